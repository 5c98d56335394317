"""Without a launcher a run trains here, and to the bit as a plain loop would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flodl_shm import Trainer
from flodl_shm.control.messages import BuildArena, End, Evaluated, Finish, Ready, Tick
from flodl_shm.errors import BadConfig, PeersLost, WeBroke
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.seeds import seed_everything
from flodl_shm.train.solo import LocalLink

EPOCHS, BATCH, SEED = 3, 8, 17


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def data(samples=200):
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, generator=draw)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train_step(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def accuracy(model, dataset):
    model.eval()
    x, y = dataset.tensors
    return (model(x).argmax(1) == y).float().mean()


def trainer(**changes):
    fields = {"dataset": data(), "epochs": EPOCHS, "batch_size": BATCH, "seed": SEED}
    return Trainer(changes.pop("model", Net), adam, train_step, **(fields | changes))


def bare_loop(dataset):
    """What `trainer()` does, by hand."""
    seed_everything(SEED)
    model = Net()
    optimizer = adam(model.parameters())
    x, y = dataset.tensors
    for epoch in range(EPOCHS):
        order = torch.tensor(permutation(len(dataset), seed=SEED, epoch=epoch))
        if epoch == 0:
            seed_everything(SEED)  # seed + rank 0: training draws anew
        for low in range(0, len(dataset) // BATCH * BATCH, BATCH):
            picked = order[low : low + BATCH]
            optimizer.zero_grad()
            train_step(model, (x[picked], y[picked])).backward()
            optimizer.step()
    return model


def test_a_run_equals_a_plain_loop_bit_for_bit():
    state = trainer().run()
    bare = bare_loop(data())
    assert state.status == "ok"
    assert state.global_step == EPOCHS * (200 // BATCH)
    for name, tensor in bare.state_dict().items():
        assert torch.equal((state.params | state.buffers)[name], tensor), name


def test_sync_gives_the_same_parameters_twice():
    one, other = (trainer(policy="sync").run() for _ in range(2))
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def test_every_sample_is_trained_once_per_epoch_but_the_tail():
    seen = []

    class Recorder:
        def __len__(self):
            return 50

        def get_batch(self, indices):
            seen.extend(indices.tolist())
            return torch.ones(len(indices), 4), torch.zeros(len(indices), dtype=torch.long)

    trainer(dataset=Recorder(), epochs=2).run()
    for epoch in range(2):
        order = permutation(50, seed=SEED, epoch=epoch)
        assert seen[epoch * 48 : (epoch + 1) * 48] == order[:48].tolist()


def test_the_consensus_is_evaluated_and_the_models_mode_is_kept():
    model = Net()
    state = trainer(model=model, eval_fn=accuracy, eval_dataset=data(40)).run()
    assert state.evaluation is not None
    assert state.evaluation > 0.8
    assert model.training
    assert torch.equal(model[0].weight, state.params["0.weight"])


def test_an_evaluation_that_raises_costs_no_training():
    def broken(model, dataset):
        raise ZeroDivisionError("no samples")

    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: no samples"):
        state = trainer(eval_fn=broken, eval_dataset=data()).run()
    assert state.status == "ok"


def test_what_the_users_step_raises_comes_through():
    def broken(model, batch):
        raise IndexError("target 7 is out of bounds")

    with pytest.raises(IndexError, match="target 7"):
        Trainer(Net, adam, broken, dataset=data()).run()


def test_a_batch_larger_than_the_dataset_is_refused():
    with pytest.raises(BadConfig, match="200 samples, fewer than 1 ranks x batch size 500"):
        trainer(batch_size=500).run()


def test_runs_may_follow_each_other():
    model = Net()
    first = trainer(model=model, epochs=1).run()
    second = trainer(model=model, epochs=1).run()
    assert not torch.equal(first.params["0.weight"], second.params["0.weight"])
    assert np.isfinite(second.params["0.weight"].numpy()).all()


class Coordinator:
    """Answers each event with the actions it was given for it."""

    def __init__(self, answers) -> None:
        self.answers = answers
        self.events = []

    def step(self, event, now):
        self.events.append(event)
        return self.answers.get(type(event), [])


READY = Ready(rank=0, row=0, digest="d", params=1, buffers=0, samples=1, device="cpu")


def test_orders_are_kept_in_sequence_and_the_rest_is_left_to_launchers():
    finish = Finish(rank=0, status="ok", reason="")
    arena = BuildArena(params=1, buffers=0, plan=None)
    link = LocalLink(Coordinator({Ready: [arena, finish]}))
    link.send(READY)
    assert link.receive(wait_for="orders") is finish


@pytest.mark.parametrize(("code", "kind"), [(2, BadConfig), (4, PeersLost), (70, WeBroke)])
def test_a_run_that_fails_raises_by_its_exit_code(code, kind):
    link = LocalLink(Coordinator({Ready: [End(status="failed", exit_code=code, reason="why")]}))
    link.send(READY)
    with pytest.raises(kind, match="why"):
        link.receive(wait_for="orders")


def test_an_order_that_never_comes_is_our_bug_not_a_hang():
    coordinator = Coordinator({})
    with pytest.raises(WeBroke, match="waits for the next window"):
        LocalLink(coordinator).receive(wait_for="the next window")
    assert coordinator.events == [Tick()]


def test_reports_reach_the_coordinator():
    coordinator = Coordinator({})
    report = Evaluated(rank=0, row=0, epoch=0, value=None)
    LocalLink(coordinator).send(report)
    assert coordinator.events == [report]
