"""Trainer refuses what cannot hold before anything is started, in sentences with a way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import flodl_shm
from flodl_shm import Trainer
from flodl_shm.control.messages import Finish, Ready
from flodl_shm.errors import BadConfig
from flodl_shm.train import session as sessions
from flodl_shm.train.turnstile import Turnstile

DATA = TensorDataset(torch.ones(8, 2))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def loss(model, batch):
    return model(batch[0]).sum()


def score(model, data):
    return 1.0


def trainer(**changes):
    model = changes.pop("model", nn.Linear(2, 1))
    optimizer = changes.pop("optimizer", sgd)
    train_step = changes.pop("train_step", loss)
    return Trainer(model, optimizer, train_step, **({"dataset": DATA} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 3}, "model is 3"),
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"model": lambda: nn.Linear(2, 1), "optimizer": sgd([torch.ones(1)])}, "is not built"),
        ({"train_step": None}, "train_step is None"),
        ({"eval_fn": 0.5}, "eval_fn is 0.5"),
        ({"scheduler": StepLR}, "the class StepLR"),
        ({"dataset": []}, "is empty"),
        ({"policy": "turbo"}, "policy 'turbo' is not one of"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 2.0}, "epochs is 2.0"),
        ({"batch_size": "32"}, "batch_size is '32'"),
        ({"batch_size": True}, "batch_size is True"),
        ({"seed": -1}, "seed is -1"),
        ({"tail": "wrap"}, "tail 'wrap'"),
        ({"anchor": 20, "max_anchor": 10}, "anchor 20 is greater than max_anchor 10"),
        ({"overhead_target": 0.9}, "overhead_target is 0.9"),
        ({"gamma": "1"}, "gamma is '1'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"step_ms": (20, 0)}, "step_ms has 0"),
        ({"eval_fn": score}, "the evaluation function has no data. Give eval_dataset="),
        ({"eval_dataset": DATA}, "eval_dataset has no effect without eval_fn"),
        ({"eval_fn": lambda m: 1, "eval_dataset": DATA}, "eval_fn cannot be called with .model, e"),
        ({"epoch_fn": 3}, "epoch_fn is 3. Give a function .epoch, worker."),
        ({"epoch_fn": lambda: 1}, "epoch_fn cannot be called with .epoch, worker.: too many"),
        ({"checkpoint_fn": "path"}, "checkpoint_fn is 'path'. Give a function .version, model."),
        ({"checkpoint_fn": lambda a, b, c: 1}, "checkpoint_fn cannot be called .*missing a requ"),
        ({"metrics_fn": ()}, r"metrics_fn is \(\). Give a function .metrics."),
        ({"metrics_fn": lambda *, m: 1}, "metrics_fn cannot be called with .metrics"),
        ({"save_every": -1}, "save_every is -1"),
        ({"save_every": True}, "save_every is True"),
        ({"epoch_callback_rank": 1.0}, "epoch_callback_rank is 1.0. Give 'fastest'"),
        ({"epoch_callback_rank": -1}, "epoch_callback_rank is '-1'"),
        ({"epoch_callback_rank": "slowest"}, "epoch_callback_rank is 'slowest'"),
        ({"outer_optimizer": "slowmo"}, "outer_optimizer is not available"),
        ({"transform": "flip"}, "transform is .flip."),
        ({"augment": 0}, "augment is 0"),
    ],
)
def test_an_argument_that_cannot_hold_is_refused_with_its_value(changes, words):
    with pytest.raises(BadConfig, match=words):
        trainer(**changes)


def test_refusals_say_what_to_do():
    with pytest.raises(BadConfig) as caught:
        trainer(optimizer=None)
    assert "lambda params: torch.optim.SGD" in caught.value.hint


def test_an_unknown_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        trainer(epoch=3)


def test_arguments_of_later_versions_may_be_said_to_be_nothing():
    assert trainer(outer_optimizer=None, augment=1).job.eval_fn is None


def test_functions_become_the_jobs():
    given = {"eval_fn": score, "epoch_fn": print, "checkpoint_fn": print, "metrics_fn": max}
    job = trainer(eval_dataset=DATA, transform=zip, **given).job
    assert {name: getattr(job, name) for name in given} == given
    assert (job.eval_dataset, job.transform) == (DATA, zip)


def test_only_what_was_said_becomes_a_wish():
    wishes = trainer(epochs=3, gamma=1, epoch_callback_rank=2).job.wishes
    assert (wishes.epoch_callback_rank, wishes.save_every) == ("2", None)
    assert (wishes.epochs, wishes.gamma, wishes.policy, wishes.seed) == (3, 1, None, None)


def test_under_a_launcher_run_is_a_rank(monkeypatch):
    sent = []

    class Link:
        def send(self, report):
            sent.append(report)

        def receive(self, *, wait_for):
            return Finish(rank=2, status="stopped", reason="test")

    class Session:
        rank, row, world_size, device, seed, slow, link = 2, 5, 4, "cpu", None, (), Link()
        callback_timeout_s = 5.0

    monkeypatch.setattr(sessions, "CURRENT", Turnstile(Session()))
    assert trainer().run().status == "stopped"
    assert isinstance(sent[0], Ready)
    assert (sent[0].rank, sent[0].row) == (2, 5)


def test_the_package_costs_no_import_of_torch():
    code = "import sys, flodl_shm; dir(flodl_shm); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_package_has_its_public_names_and_no_others():
    assert flodl_shm.Trainer is Trainer
    for name in flodl_shm.__all__:
        assert getattr(getattr(flodl_shm, name), "__name__", name) == name
    assert dir(flodl_shm) == sorted(flodl_shm.__all__)
    assert flodl_shm.TrainedState.__name__ == "TrainedState"
    assert issubclass(BadConfig, flodl_shm.FlodlError)
    with pytest.raises(AttributeError, match="no attribute 'Coordinator'"):
        _ = flodl_shm.Coordinator


def test_an_abort_right_after_the_start_is_an_end_too():
    for _ in range(20):  # before, while and after the model is built
        handle = trainer(epochs=1000, batch_size=2).start()
        handle.abort()
        state = handle.join(timeout_s=60)
        assert state.status == "stopped"
