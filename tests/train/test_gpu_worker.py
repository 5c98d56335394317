"""A worker follows its orders, reports what it did, and leaves nothing in the arena."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flodl_shm.control.messages import Arrived, Attached, Evaluate, Evaluated, Finished, Left, Ready
from flodl_shm.control.options import Wishes
from flodl_shm.ids import Rank
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.replica import Replica
from flodl_shm.wire.layout import plan_layout

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, SAMPLES, Net, Session, attach, grant, job, run, train_step


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
