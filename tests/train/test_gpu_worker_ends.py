"""Evaluation, the end, and what goes wrong: a worker beside its windows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flodl_shm.control.messages import (
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Ready,
)
from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.ids import Rank
from flodl_shm.train.session import SlowDown

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, Net, Session, attach, grant, job, run, train_step


def test_evaluation_reports_its_value_and_restores_the_mode():
    seen = []

    def eval_fn(model, data):
        seen.append(data)
        model.eval()
        return torch.tensor(0.75)

    net = Net()
    net.norm.eval()  # the user froze it: that must survive
    session = Session(attach(), Evaluate(Rank(1), 4), FINISH)
    state = run(session, job(model=net, eval_fn=eval_fn, eval_dataset="held out"))
    (report,) = session.link.of(Evaluated)
    assert (report.epoch, report.value, report.error) == (4, 0.75, "")
    assert report.elapsed_ns > 0
    assert seen == ["held out"]
    assert net.training
    assert not net.norm.training
    assert state.evaluation == 0.75


def test_evaluation_that_raises_is_reported_with_its_place():
    def eval_fn(model, data):
        raise ValueError("no such metric")

    session = Session(attach(), Evaluate(Rank(1), 1), FINISH)
    assert run(session, job(eval_fn=eval_fn)).status == "ok"
    (report,) = session.link.of(Evaluated)
    assert report.value is None
    assert report.error.startswith("ValueError: no such metric (")
    assert "test_gpu_worker_ends.py:" in report.error


def test_without_a_callback_there_is_no_value():
    session = Session(attach(), Evaluate(Rank(1), 1), FINISH)
    run(session)
    assert session.link.of(Evaluated)[0].value is None


def test_a_stop_before_the_start_still_hands_the_state_back():
    session = Session(Finish(rank=Rank(1), status="stopped", reason="interrupt"))
    state = run(session)
    assert (state.status, state.global_step) == ("stopped", 0)
    assert set(state.params) == {"norm.weight", "norm.bias", "out.weight", "out.bias"}
    assert [type(report) for report in session.link.sent] == [Ready, Finished]


@pytest.mark.parametrize("orders", [(grant(1, 0),), (attach(), attach())])
def test_orders_out_of_turn_are_our_bug(orders):
    with pytest.raises(WeBroke, match=r"Grant came before Attach|Attach came in the middle"):
        run(Session(*orders))


def test_the_users_exception_comes_through_unchanged():
    def broken(model, batch):
        raise KeyError("label")

    session = Session(attach(), grant(1, 0), grant(2, 1, ((0, 4),)))
    with pytest.raises(KeyError, match="label"):
        run(session, job(train_step=broken))


def test_gradients_are_clipped_as_planned():
    net = nn.Linear(3, 1)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    session = Session(attach(max_grad_norm=0.5), grant(1, 0), grant(2, 1, ((0, 4),)), FINISH)
    run(session, job(model=net, train_step=lambda m, b: 1000 * train_step(m, b)))
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.05, rel=1e-3)


def test_slow_and_paced_waits_are_slept():
    slept = []
    session = Session(attach(), grant(1, 0), grant(2, 2, ((0, 8),)), FINISH)
    session.slow = (SlowDown(2.0),)
    run(session, job(step_ms=(5.0, 10.0)), sleep=slept.append)
    assert slept == pytest.approx([0.02, 0.02], rel=0.5)


def test_a_time_for_each_rank_or_none():
    session = Session(attach())
    with pytest.raises(BadConfig, match="step_ms gives 1 times for 2 ranks"):
        run(session, job(step_ms=(5.0,)))
