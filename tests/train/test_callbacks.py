"""The user's functions are called, timed and contained; the training is as it was afterwards."""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from flodl_shm.control.messages import EpochMetrics
from flodl_shm.ids import Rank
from flodl_shm.train.callbacks import Callbacks, Ran
from flodl_shm.train.epoch_handle import EpochHandle

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import Net, Ticking, job

CPU = torch.device("cpu")
TOLD = EpochMetrics(Rank(0), 1, 0.5, 24)
FUNCTIONS = {
    "epoch": "epoch_fn",
    "checkpoint": "checkpoint_fn",
    "evaluation": "eval_fn",
    "metrics": "metrics_fn",
}
EACH = pytest.mark.parametrize("which", FUNCTIONS)


@pytest.fixture
def net():
    return Net()


def callbacks(timeout_s=60.0, **functions):
    return Callbacks(
        job(eval_dataset="held out", **functions), timeout_s=timeout_s, clock=Ticking()
    )


def handle(net):
    return EpochHandle(SimpleNamespace(model=net, rank=0, world_size=1, current_lr=0.1))


def call(which, function, net, **more):
    """The function in its role, with whatever a role gives it."""
    made = callbacks(**{FUNCTIONS[which]: function}, **more)
    return {
        "epoch": lambda: made.epoch(3, handle(net)),
        "checkpoint": lambda: made.checkpoint(9, net),
        "evaluation": lambda: made.evaluate(net, CPU),
        "metrics": lambda: made.metrics(TOLD, net),
    }[which]()


def test_each_gets_what_is_promised(net):
    seen = []
    made = callbacks(
        epoch_fn=lambda *args: seen.append(args),
        checkpoint_fn=lambda *args: seen.append(args),
        eval_fn=lambda *args: seen.append(args) or 2,
        metrics_fn=lambda *args: seen.append(args),
    )
    one = handle(net)
    assert made.epoch(3, one) == Ran(None, 1000, "")
    assert made.checkpoint(9, net) == Ran(None, 1000, "")
    assert made.evaluate(net, CPU) == Ran(2.0, 1000, "")
    assert made.metrics(TOLD) == Ran(None, 1000, "")
    assert seen == [(3, one), (9, net), (net, "held out"), (TOLD,)]


def test_it_says_which_there_are_and_does_nothing_for_the_others(net):
    assert callbacks().has == ()
    assert callbacks(metrics_fn=print, epoch_fn=print).has == ("epoch", "metrics")
    assert callbacks(**dict.fromkeys(FUNCTIONS.values(), print)).has == tuple(FUNCTIONS)
    made = callbacks()
    nothing = (
        made.epoch(0, handle(net)),
        made.checkpoint(1, net),
        made.evaluate(net, CPU),
        made.metrics(TOLD),
    )
    assert nothing == (Ran(),) * 4


@EACH
def test_one_that_raises_is_reported_with_its_place_and_its_traceback_shown(which, net, capsys):
    def function(*args):
        net.eval()
        raise KeyError("in it")

    ran = call(which, function, net)
    assert ran.value is None
    assert ran.elapsed_ns == 1000
    assert ran.error.startswith("KeyError: 'in it' (")
    assert "test_callbacks.py:" in ran.error
    err = capsys.readouterr().err
    assert err.startswith(f"{FUNCTIONS[which]} failed; the training goes on:\nTraceback")
    assert 'raise KeyError("in it")' in err
    assert "time_limit.py" not in err
    assert net.training


@EACH
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_means_the_process_comes_through(which, kind, net):
    def function(*args):
        net.eval()
        raise kind

    with pytest.raises(kind):
        call(which, function, net)
    assert net.training


@EACH
def test_one_that_hangs_is_left_and_its_place_shown(which, net, capsys):
    def function(*args):
        threading.Event().wait()  # here it hangs

    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        ran = call(which, function, net, timeout_s=0.02)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ran.error.startswith("abandoned after 0.02 s (")
    assert "test_callbacks.py:" in ran.error
    assert "# here it hangs" in capsys.readouterr().err


@EACH
def test_modes_gradients_and_random_numbers_are_as_before(which, net):
    def function(*args):
        net.train()
        net.norm.requires_grad_(True)
        torch.set_grad_enabled(False)
        with torch.enable_grad():
            net(torch.ones(4, 3)).sum().backward()
        net.eval()
        return torch.rand(1).item() + np.random.random() + random.random()

    net.norm.eval()
    net.out.weight.grad = torch.zeros(1, 3)
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    draws = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    assert not call(which, function, net).error
    assert (net.training, net.norm.training) == (True, False)
    assert torch.is_grad_enabled()
    assert {name: parameter.grad for name, parameter in net.named_parameters()} == grads
    after = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    assert after == draws


def test_a_function_that_changes_a_parameters_shape_costs_its_gradient_only(net):
    def function(version, model):
        model.out.weight.grad = None
        model.out.weight.data = torch.zeros(2, 2)

    net.out.weight.grad = torch.zeros(1, 3)
    assert not call("checkpoint", function, net).error
    assert net.out.weight.grad is None


def test_an_evaluation_is_in_eval_mode_and_leaves_no_trace(net):
    def function(model, data):
        assert not model.training
        model.train()
        with torch.no_grad():
            model.out.weight.zero_()
        return model(torch.ones(4, 3)).mean()

    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    ran = call("evaluation", function, net)
    assert isinstance(ran.value, float)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("result", [2, np.float32(2), torch.tensor(2.0), torch.tensor([2])])
def test_a_score_is_whatever_is_one_number(result, net):
    assert call("evaluation", lambda *_: result, net) == Ran(2.0, 1000, "")


def test_a_score_may_be_nan(net):
    ran = call("evaluation", lambda *_: float("nan"), net)
    assert ran.value is not None
    assert math.isnan(ran.value)
    assert ran.error == ""


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "eval_fn returned NoneType, which is not one number ("),
        ("0.5", "eval_fn returned str"),
        (torch.ones(2), "eval_fn returned a tensor of shape (2,) and torch.float32"),
        (10**400, "eval_fn returned int"),
    ],
)
def test_a_score_that_is_no_number_is_an_error_in_words(result, words, net, capsys):
    ran = call("evaluation", lambda *_: result, net)
    assert ran.value is None
    assert ran.error.startswith(words)
    assert "test_callbacks.py:" in ran.error
    assert ran.error in capsys.readouterr().err


def test_wishes_of_an_epoch_function_count_unless_it_fails(net):
    one = handle(net)
    callbacks(epoch_fn=lambda epoch, worker: worker.set_lr(0.3)).epoch(0, one)
    assert one.wanted == (0.3, 1.0)

    def fails(epoch, worker):
        worker.set_lr(0.3)
        worker.scale_lr(-1)

    other = handle(net)
    ran = callbacks(epoch_fn=fails).epoch(0, other)
    assert "scale_lr got -1. It must be finite and at least 0. (" in ran.error
    assert other.wanted == (None, 1.0)


def test_a_closed_screen_is_nobodys_loss(net, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert call("metrics", lambda m: 1 / 0, net).error.startswith("ZeroDivisionError")


def test_a_model_without_parameters_and_none_at_all_are_guarded_too():
    assert callbacks(checkpoint_fn=lambda *_: None).checkpoint(1, nn.ReLU()).error == ""
