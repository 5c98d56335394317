"""The user's own loop trains as run() does, hears what happens, and may leave a plan early."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flodl_shm.control.messages import (
    Arrived,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Left,
    Ready,
    Request,
)
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank
from flodl_shm.train.cooperative import EvalResult, Plan
from flodl_shm.train.gpu_worker import GpuWorker

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from own_loop import TWO, Records, step, train, trainer, worker
from worker_rig import FINISH, SAMPLES, Net, Session, Ticking, attach, grant, job

# ---- as run() does ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_it_trains_what_run_trains_bit_for_bit(policy):
    more = {"policy": policy, "max_grad_norm": 0.1, "scheduler": lambda step: 0.1 / (1 + step)}
    managed = trainer(**more).run()
    own = trainer(**more).worker()
    plans = train(own)
    assert own.state.status == managed.status == "ok"
    assert own.state.global_step == managed.global_step == 3 * SAMPLES // 4
    everything = managed.params | managed.buffers
    for name, tensor in (own.state.params | own.state.buffers).items():
        assert torch.equal(tensor, everything[name]), name
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans)
    assert {plan.epoch for plan in plans} == {0, 1, 2}
    assert len({plan.round for plan in plans}) == len(plans)


def test_step_by_step_is_the_same():
    one, other = trainer().worker(), trainer().worker
    plans = train(one)
    w = other()
    while w.next_plan() is not None:
        while (batch := w.next_batch()) is not None:
            step(w, batch)
    state = w.finish()
    assert all(torch.equal(state.params[name], p) for name, p in one.state.params.items())
    assert plans


def test_reports_are_those_of_the_managed_loop():
    own, session = worker(*TWO)
    train(own)
    managed = Session(*TWO)
    GpuWorker(job(), managed, clock=Ticking()).run()
    kinds = [type(report) for report in session.link.sent]
    assert kinds == [type(report) for report in managed.link.sent]
    for mine, theirs in zip(session.link.of(Arrived), managed.link.of(Arrived), strict=True):
        assert (mine.steps, mine.picks, mine.loss_count) == (
            theirs.steps,
            theirs.picks,
            theirs.loss_count,
        )
        assert mine.loss_sum == theirs.loss_sum
    assert session.link.of(Finished)[0].params_sha256 == managed.link.of(Finished)[0].params_sha256


def test_windows_without_a_batch_are_gone_through_unseen():
    own, session = worker(
        attach(), grant(1, 0), grant(2, 1, ((0, 4),)), grant(3, 0, after=4), FINISH
    )
    assert train(own) == [Plan(epoch=0, round=2, batches=1)]
    assert [report.round for report in session.link.of(Left)] == [1, 2, 3]


def test_the_step_that_fills_the_plan_goes_through_the_round():
    own, session = worker(*TWO)
    own.next_plan()
    step(own)
    assert session.link.of(Arrived)[-1].round == 1
    step(own)
    assert session.link.of(Left)[-1].round == 2
    assert own.next_batch() is None


def test_shutdown_is_told_by_the_step_after_which_nothing_is_left():
    stopped = Finish(rank=Rank(1), status="stopped", reason="interrupt")
    own, _ = worker(attach(), grant(1, 0), grant(2, 2, ((0, 8),)), stopped)
    own.next_plan()
    assert [step(own).shutdown, step(own).shutdown] == [False, True]
    assert own.finish().status == "stopped"


def test_a_stop_before_the_first_window_is_an_end():
    own, session = worker(Finish(rank=Rank(1), status="stopped", reason="interrupt"))
    assert train(own) == []
    assert own.state.status == "stopped"
    assert [type(report) for report in session.link.sent] == [Ready, Finished]


def test_facts():
    own, _ = worker(*TWO)
    assert (own.rank, own.world_size, own.device) == (1, 2, torch.device("cpu"))
    assert isinstance(own.model, Net)


def test_gradients_of_other_business_do_not_count():
    """What the script added to them before it asked for a batch, or left with one not stepped."""

    def train_with(noise):
        own, session = worker(*TWO, the_job=job(model=nn.Linear(3, 1)))
        torch.manual_seed(3)
        nn.init.ones_(own.model.weight)
        nn.init.zeros_(own.model.bias)
        while own.next_plan() is not None:
            if noise:
                own.model(torch.ones(1, 3)).sum().backward()
            while (batch := own.next_batch()) is not None:
                step(own, batch)
                assert own.model.weight.grad is None
        return session.link.of(Finished)[0].params_sha256

    assert train_with(noise=True) == train_with(noise=False)


def test_time_between_two_batches_is_work_and_between_two_plans_is_neither_work_nor_wait():
    own, session = worker(*TWO)
    clock = own._worker._clock
    own.next_plan()
    step(own)
    clock.now += 1_000_000
    step(own)
    clock.now += 50_000_000
    own.next_plan()
    clock.now += 50_000_000
    step(own)
    _, second, third = session.link.of(Arrived)
    assert 1_000_000 <= second.busy_ns < 1_100_000
    whole_ns = second.first_ns + second.rest_ns
    assert 0 <= second.busy_ns + second.data_ns - whole_ns <= 1000  # a look at the clock
    assert third.busy_ns + third.wait_ns + third.data_ns < 100_000


# ---- left early ------------------------------------------------------------------------------


def test_what_was_not_stepped_is_not_consumed():
    late = grant(3, 2, ((0, 12),), after=0)  # issued before the second one was left
    own, session = worker(
        attach(), grant(1, 0), grant(2, 3, ((0, 12),)), late, FINISH, the_job=job(dataset=Records())
    )
    own.next_plan()
    step(own)
    own.next_batch()
    assert own.next_plan().round == 3
    step(own)
    step(own)
    assert [report.picks for report in session.link.of(Arrived)] == [0, 4, 12]
    assert [report.steps for report in session.link.of(Arrived)] == [0, 1, 2]
    seen = own._worker._source.fetch.__self__.seen
    assert seen[1] == seen[2]  # fetched in vain, and again
    assert own.state.status == "ok"


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_the_real_coordinator_deals_out_again_what_was_left(policy):
    data, trained = Records(60), []
    own = trainer(dataset=data, policy=policy, epochs=2, anchor=4).worker()
    for count, plan in enumerate(own.plans()):
        for number, batch in enumerate(own.batches()):
            if count % 3 == 1 and number == plan.batches // 2:
                break  # with a batch at hand
            step(own, batch)
            trained += [(plan.epoch, index) for index in data.seen[-1]]
    assert own.finish().global_step == len(trained) // 4
    assert sorted(trained) == [(epoch, index) for epoch in range(2) for index in range(60)]


def test_plans_that_are_never_trained_are_no_training():
    own = trainer().worker()
    with pytest.raises(BadConfig, match="11 plans in a row were left without a step"):
        for _ in own.plans():
            pass
    own.__exit__(None, BadConfig("seen"), None)


# ---- news and wishes -------------------------------------------------------------------------


def told(epoch, value=None, **more):
    return EpochMetrics(rank=Rank(1), epoch=epoch, loss=0.5, picks=8, value=value, **more)


def test_news_come_in_order_and_without_waiting():
    news = (told(0), told(0, 0.75), told(1, 0.5, closed=False))
    own, session = worker(
        attach(), grant(1, 0), grant(2, 2, ((0, 8),)), *news, grant(3, 1, after=8), told(1), FINISH
    )
    assert own.epoch_metrics is None
    own.next_plan()
    step(own)
    waits = len(session.link.waited)
    assert own.poll_metrics() == [news[0], news[1]]  # they lay behind the grant
    assert own.poll_metrics() == []
    assert own.poll_eval() == [EvalResult(0, 0.75), EvalResult(1, 0.5)]
    assert own.epoch_metrics == news[2]
    assert len(session.link.waited) == waits
    step(own)
    own.next_plan()
    assert own.finish().status == "ok"
    assert own.poll_metrics() == [told(1)]


def test_orders_read_early_keep_their_turn():
    own, session = worker(
        attach(), grant(1, 0), grant(2, 1, ((0, 4),)), Evaluate(Rank(1), 0), told(0), FINISH
    )
    own.next_plan()
    assert own.poll_metrics() == [told(0)]
    assert session.link.of(Evaluated) == []
    step(own)
    kinds = [type(report) for report in session.link.sent]
    assert kinds[-4:] == [Arrived, Left, Evaluated, Finished]


def test_the_final_evaluation_is_there_after_the_last_plan():
    own, _ = worker(attach(), grant(1, 0), grant(2, 1, ((0, 4),)), told(0, 0.25), FINISH)
    train(own)
    assert own.poll_eval() == [EvalResult(0, 0.25)]


def test_wishes_are_sent_while_there_is_something_to_train():
    own, session = worker(*TWO)
    own.request_eval()
    own.request_checkpoint()
    train(own)
    own.request_eval()
    assert [request.what for request in session.link.of(Request)] == ["evaluation", "checkpoint"]


def test_alone_there_are_no_news_and_wishes_do_nothing():
    def score(model, data):
        return 0.5

    own = trainer(eval_fn=score, eval_dataset=[1], eval_every=1).worker()
    own.request_eval()
    own.request_checkpoint()
    train(own)
    assert (own.poll_metrics(), own.poll_eval(), own.epoch_metrics) == ([], [], None)
    assert own.state.evaluation == 0.5
