"""A free run measures the rank's rate and leaves the run that follows as it would have been."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flodl_shm.control.messages import Attach, Attached, Finish, Finished, Grant, Seat
from flodl_shm.control.options import Wishes
from flodl_shm.control.plan import settle
from flodl_shm.ids import Rank, Round, Row, Slot
from flodl_shm.train import free_run
from flodl_shm.train.data.source import as_source
from flodl_shm.train.free_run import LEAST, WARM_UP, free_picks_per_s, throwaway
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.job import Job
from flodl_shm.train.lone_meeting import LoneMeeting
from flodl_shm.train.lr import LearningRate
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.step import Stepper
from flodl_shm.train.window import WindowRunner

MS = 1_000_000
SAMPLES, BATCH = 10, 3
PLAN = settle(
    Wishes(policy="sync", batch_size=BATCH, seed=5), Wishes(), world_size=1, samples=SAMPLES
)


class Clock:
    """Stands still but for those who sleep."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class Net(nn.Sequential):
    """Draws random numbers in building and in training, and keeps buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def train_step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def job(**changes):
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=draw), torch.randn(SAMPLES, 1, generator=draw)
    )
    fields = {"model": Net, "optimizer": adam, "train_step": train_step, "dataset": data}
    return Job(**fields | changes)


# ---- the rate --------------------------------------------------------------------------------


def rate(step_ms, seconds, seen=None):
    """Of a rank whose steps take exactly `step_ms`."""
    clock, one = Clock(), job()
    source = as_source(one.dataset)

    class Spy:
        def fetch(self, indices):
            if seen is not None:
                seen.append(indices.tolist())
            return source.fetch(indices)

        def __len__(self):
            return SAMPLES

    model = one.build_model(torch.device("cpu"))
    optimizer = one.build_optimizer(model)
    runner = WindowRunner(
        rank=Rank(0),
        batch_size=BATCH,
        source=Spy(),
        stepper=Stepper(model, optimizer, train_step),
        rate=LearningRate(optimizer, None, 1),
        pacer=Exact(step_ms),
        meeting=LoneMeeting(),
        device=torch.device("cpu"),
        clock=clock,
        sleep=clock.sleep,
    )
    return free_picks_per_s(runner, np.arange(SAMPLES), seconds)


class Exact(Pacer):
    """Paced, without jitter."""

    def __init__(self, step_ms):
        super().__init__(step_ms=step_ms)
        self._ms = step_ms

    def pad(self, elapsed_ns, step_index, epoch):
        return round(self._ms * MS) - elapsed_ns


def test_the_rate_is_picks_per_second():
    assert rate(20.0, seconds=1.5) == pytest.approx(BATCH / 0.02)


def test_slow_ranks_are_measured_over_enough_batches():
    seen = []
    assert rate(200.0, seconds=1.0, seen=seen) == pytest.approx(BATCH / 0.2)
    assert len(seen) == LEAST + WARM_UP


def test_fast_ranks_are_measured_for_the_time_asked_for():
    seen = []
    rate(1.0, seconds=0.5, seen=seen)
    assert len(seen) == 500 + WARM_UP


def test_only_full_batches_count_and_the_data_are_gone_through_again():
    seen = []
    rate(1.0, seconds=0.0, seen=seen)
    assert seen[:4] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


# ---- copies ----------------------------------------------------------------------------------


def test_a_finished_optimizer_is_copied_with_its_model():
    net = Net()
    mine = job(model=net, optimizer=adam(net.parameters()))
    other = throwaway(mine)
    assert other.model is not net
    held = {id(p) for group in other.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in other.model.parameters()}
    assert held.isdisjoint({id(p) for p in net.parameters()})


def test_a_factory_needs_no_copy():
    mine = job()
    assert throwaway(mine) is mine


# ---- the run that follows --------------------------------------------------------------------


class Link:
    def __init__(self) -> None:
        self.sent = []
        roster = (Seat(Rank(0), Row(0), Slot(0)),)
        grants = [
            Grant(Rank(0), Round(k), 0, roster, Rank(0), 1, 1, 1, ((start, start + BATCH),), start)
            for k, start in ((2, 0), (3, BATCH), (4, 2 * BATCH))
        ]
        attach = Attach(rank=Rank(0), plan=PLAN, slot=Slot(0), seats=())
        self._orders = [attach, *grants, Finish(rank=Rank(0), status="ok", reason="")]

    def send(self, report):
        self.sent.append(report)

    def receive(self, *, wait_for):
        return self._orders.pop(0)


class Session:
    rank, row, world_size, device, seed = Rank(0), Row(0), 1, "cpu", 5
    slow = ()
    callback_timeout_s = 5.0
    run_id = save_stem = ""

    def __init__(self, free_run_s) -> None:
        self.free_run_s = free_run_s
        self.link = Link()

    def note_errand(self, since):
        pass

    def attach(self, order):
        return LoneMeeting(), None


def train(free_run_s, **changes):
    """(Attached, hash of the parameters, state) of one run."""
    session = Session(free_run_s)
    state = GpuWorker(job(**changes), session).run()
    told = {type(report): report for report in session.link.sent}
    return told[Attached], told[Finished].params_sha256, state


def test_the_rate_is_reported_with_the_attachment():
    assert train(0.0)[0].free_picks_per_s == 0.0
    assert train(0.001)[0].free_picks_per_s > 0.0


@pytest.mark.parametrize("finished", [False, True], ids=["factory", "module"])
def test_the_run_is_the_same_with_and_without(finished):
    def changes():
        if not finished:
            return {}
        torch.manual_seed(9)
        net = Net()
        return {"model": net, "optimizer": adam(net.parameters())}

    _, without, before = train(0.0, **changes())
    _, with_it, after = train(0.001, **changes())
    assert with_it == without
    for name, value in before.buffers.items():
        assert torch.equal(after.buffers[name], value), name


def test_a_free_run_that_touches_the_model_would_be_seen(monkeypatch):
    net = Net()
    monkeypatch.setattr(free_run, "throwaway", lambda same: same)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    _, without, _ = train(0.0, model=net)
    net.load_state_dict(start)
    assert train(0.001, model=net)[1] != without
