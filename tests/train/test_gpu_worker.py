"""A worker follows its orders, reports what it did, and leaves nothing in the arena."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flodl_shm.control.messages import (
    Arrived,
    Attach,
    Attached,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Grant,
    Left,
    Ready,
    Seat,
    Settled,
    Wishes,
)
from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.ids import Rank, Round, Row, Slot
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.job import Job
from flodl_shm.train.reduce import Outcome
from flodl_shm.train.replica import Replica
from flodl_shm.train.session import SlowDown
from flodl_shm.wire.layout import plan_layout

SAMPLES = 24
FINISH = Finish(rank=Rank(1), status="ok", reason="all epochs done")


class Ticking:
    """A clock that moves by one microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1000
        return self.now


@dataclass
class Script:
    """A link that gives its orders one after the other."""

    orders: list
    sent: list = field(default_factory=list)
    waited: list = field(default_factory=list)

    def send(self, report) -> None:
        self.sent.append(report)

    def receive(self, *, wait_for):
        self.waited.append(wait_for)
        return self.orders.pop(0)

    def of(self, kind):
        return [report for report in self.sent if isinstance(report, kind)]


class Meeting:
    """Others contribute 5 steps to every round and halve this rank's parameters."""

    def __init__(self, slot) -> None:
        self.slot = slot
        self.arrivals: list[dict] = []

    def arrive(self, number, roster, /, **brought) -> None:
        self.arrivals.append({"round": number, "roster": roster, **brought})

    def complete(self):
        mine = self.arrivals[-1]
        if self.slot is not None and mine["steps"]:
            self.slot.mul_(0.5)
        return Outcome(
            round=mine["round"],
            contributors=(Rank(0), Rank(1)),
            steps=mine["steps"] + 5,
            mass=mine["mass"],
            divergence=0.25,
            barrier_ns=7,
            reduce_ns=9,
        )

    def alive(self, row):
        return True

    def publish_step(self, number, done, now, pace_ns):
        pass

    def pace_of(self, row):
        return Round(0), 0, 0, 0


class Session:
    """Rank 1 of 2."""

    rank, row, world_size, device = Rank(1), Row(1), 2, "cpu"
    slow: tuple[SlowDown, ...] = ()
    free_run_s = 0.0

    def __init__(self, *orders, seed=None, floats=0) -> None:
        self.seed = seed
        self.link = Script(list(orders))
        self.slot = torch.zeros(floats) if floats else None
        self.meeting = Meeting(self.slot)

    def attach(self, order):
        return self.meeting, self.slot


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x))


def train_step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def job(**changes):
    draw = torch.Generator().manual_seed(1)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 3, generator=draw), torch.randn(SAMPLES, 1, generator=draw)
    )
    fields = {
        "model": Net,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train_step": train_step,
        "dataset": dataset,
    }
    return Job(**fields | changes)


def attach(**changes):
    fields = {
        "policy": "cadence",
        "world_size": 2,
        "epochs": 2,
        "batch_sizes": (4, 4),
        "seed": 11,
        "tail": "drop",
        "samples": SAMPLES,
        "anchor": 10,
        "max_anchor": 100,
        "overhead_target": 0.05,
        "gamma": 0.5,
        "augment": 1,
        "eval_every": 0,
    }
    return Attach(rank=Rank(1), plan=Settled(**fields | changes), slot=Slot(1), global_step=0)


def grant(number, batches, spans=(), *, epoch=0, after=0):
    return Grant(
        rank=Rank(1),
        round=Round(number),
        epoch=epoch,
        roster=tuple(Seat(Rank(r), Row(r), Slot(r)) for r in range(2)),
        anchor_rank=Rank(0),
        anchor_steps=batches,
        planned=batches,
        ceiling=batches,
        spans=spans,
        after=after,
    )


def run(session, the_job=None, **times):
    return GpuWorker(the_job or job(), session, clock=Ticking(), **times).run()


def test_ready_says_what_was_built():
    session = Session(FINISH)
    run(session, job(wishes=Wishes(epochs=3)))
    (ready,) = session.link.of(Ready)
    layout = plan_layout(Replica.facts(Net()))
    assert (ready.rank, ready.row, ready.samples, ready.device) == (1, 1, SAMPLES, "cpu")
    assert (ready.digest, ready.params) == (layout.digest, layout.param_floats)
    assert ready.buffers == layout.buffer_floats > 0
    assert ready.wishes == Wishes(epochs=3)
    assert "param out.weight 1x3 float32" in ready.names


def test_reports_come_in_the_order_of_the_life_of_a_rank():
    session = Session(attach(), grant(1, 0), grant(2, 2, ((0, 8),)), Evaluate(Rank(1), 1), FINISH)
    run(session)
    kinds = [type(report) for report in session.link.sent]
    assert kinds == [Ready, Attached, Arrived, Left, Arrived, Left, Evaluated, Finished]
    assert session.link.waited[0] == "the other ranks to build their models"


def test_a_window_is_reported_with_its_work_and_times():
    session = Session(
        attach(), grant(1, 0), grant(2, 3, ((4, 16),)), grant(3, 1, ((0, 4),), after=12), FINISH
    )
    state = run(session)
    spread, second, third = session.link.of(Arrived)
    assert (spread.steps, spread.picks, spread.began_at, spread.loss_count) == (0, 0, 0, 0)
    assert (second.steps, second.batches, second.picks) == (3, 3, 12)
    assert third.picks == 16
    assert second.busy_ns >= 3000
    assert second.first_ns + second.rest_ns >= second.busy_ns + second.data_ns - 1000
    assert second.wait_ns > 0
    assert second.loss_count == 3
    assert second.loss_sum > 0
    assert second.lr == 0.1
    assert state.global_step == 4 + 3 * 5
    left = session.link.of(Left)[1]
    assert (left.contributors, left.divergence) == ((0, 1), 0.25)
    assert (left.barrier_ns, left.reduce_ns) == (7, 9)
    assert left.left_at > 0


def test_mass_is_steps_to_the_power_of_gamma_and_zero_without_steps():
    session = Session(attach(), grant(1, 0), grant(2, 4, ((0, 16),)), FINISH)
    run(session)
    first, second = session.meeting.arrivals
    assert (first["steps"], first["mass"], first["picks"]) == (0, 0.0, 0)
    assert (second["steps"], second["mass"], second["picks"]) == (4, 2.0, 16)
    assert second["roster"] == grant(1, 0).roster


def test_a_rank_that_ran_ahead_of_its_grant_skips_what_it_has_consumed():
    """The second grant was issued while the first was under way: its spans begin with it."""
    seen = []

    class Recorder:
        def __len__(self):
            return SAMPLES

        def get_batch(self, indices):
            seen.extend(indices.tolist())
            return torch.ones(len(indices), 3), torch.ones(len(indices), 1)

    early = grant(3, 2, ((0, 12), (16, 24)), after=0)
    session = Session(attach(), grant(1, 0), grant(2, 2, ((0, 12),)), early, FINISH)
    run(session, job(dataset=Recorder()))
    order = permutation(SAMPLES, seed=11, epoch=0)
    assert seen == [*order[:12], *order[16:20]]


def test_another_epoch_has_another_order():
    seen = []

    class Recorder:
        def __len__(self):
            return SAMPLES

        def get_batch(self, indices):
            seen.append(indices.copy())
            return torch.ones(len(indices), 3), torch.ones(len(indices), 1)

    session = Session(
        attach(),
        grant(1, 0),
        grant(2, 1, ((0, 4),)),
        grant(3, 1, ((0, 4),), epoch=1, after=4),
        FINISH,
    )
    run(session, job(dataset=Recorder()))
    assert not np.array_equal(seen[0], seen[1])
    assert seen[1].tolist() == permutation(SAMPLES, seed=11, epoch=1)[:4].tolist()


def test_the_scheduler_follows_the_global_step():
    positions = []

    def schedule(step):
        positions.append(step)
        return 0.01

    session = Session(
        attach(), grant(1, 0), grant(2, 2, ((0, 8),)), grant(3, 2, ((8, 16),), after=8), FINISH
    )
    run(session, job(scheduler=schedule))
    assert positions == [5, 6, 12, 13]  # the others do 5 steps before each round


def test_ranks_build_alike_and_train_differently():
    built, drawn = [], []

    def model():
        built.append((torch.rand(1).item(), np.random.rand()))
        return Net()

    def step(model, batch):
        drawn.append((torch.rand(1).item(), np.random.rand()))
        return train_step(model, batch)

    for rank in (0, 1):
        session = Session(attach(), grant(1, 0), grant(2, 1, ((0, 4),)), FINISH, seed=11)
        session.rank = session.row = rank
        run(session, job(model=model, train_step=step))
    assert built[0] == built[1]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("session_seed", "script_seed", "used"), [(5, 6, 5), (None, 6, 6), (None, None, 0)]
)
def test_the_sessions_seed_wins_over_the_scripts(session_seed, script_seed, used):
    drawn = []

    def model():
        drawn.append(torch.rand(1).item())
        return Net()

    run(Session(FINISH, seed=session_seed), job(model=model, wishes=Wishes(seed=script_seed)))
    torch.manual_seed(used)
    assert drawn == [torch.rand(1).item()]


def test_training_goes_on_from_what_the_round_left_and_ends_outside_of_the_arena():
    net = Net()
    layout = plan_layout(Replica.facts(net))
    session = Session(
        attach(), grant(1, 0), grant(2, 1, ((0, 4),)), FINISH, floats=layout.grid.floats
    )
    inside = []

    def step(model, batch):
        inside.append(model.out.weight.data_ptr() - session.slot.data_ptr())
        return train_step(model, batch)

    state = run(session, job(model=net, train_step=step))
    assert 0 <= inside[0] < 4 * layout.grid.floats
    (finished,) = session.link.of(Finished)
    weight = state.params["out.weight"].clone()
    session.slot.fill_(float("nan"))  # the arena is unmapped now, for all the user may know
    assert torch.equal(net.out.weight, weight)
    assert torch.equal(state.params["out.weight"], weight)
    assert finished.params_sha256 == Replica(net).sha256()
    assert finished.rss_mib >= finished.pss_mib > 1


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
    assert "test_gpu_worker.py:" in report.error


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
