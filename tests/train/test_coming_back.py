"""A rank that comes back: the consensus in its first round, the rate's position, a peer's state."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from flodl_shm.control.messages import Finish, Lend, Lent, Seat
from flodl_shm.ids import Rank, Row
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.train.checkpoint.names import loan_folder
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.reduce import Reducer
from flodl_shm.wire.layout import plan_arena

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, Session, attach, grant, job, run

LIMIT_S = 20.0


@pytest.mark.parametrize("buffers", [0, 300])
def test_a_joiner_gets_the_consensus_of_a_round_nobody_has_moved_in(buffers):
    plan = plan_arena(params=9_000, buffers=buffers, slots=2, rows=3)
    memory = Segment.create(4096, purpose="test-bells")
    bells = [Doorbell.create(memory.view.cast("Q"), 8 * row) for row in range(3)]
    arena = Arena(Segment.create(plan.size, purpose="test"), plan, bells)
    roster = (Seat(Rank(0), Row(0), 0), Seat(Rank(1), Row(2), 1, joiner=True))
    outcomes = {}

    def meet(rank, row, value):
        reducer = Reducer(arena, seat_row=row, slot=rank)
        arena.slot(rank).fill_(value)
        reducer.arrive(5, roster, steps=0, mass=0.0, picks=0)
        outcomes[rank] = reducer.complete()

    threads = [threading.Thread(target=meet, args=one) for one in ((0, 0, 3.0), (1, 2, 9.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outcomes[0].contributors == outcomes[1].contributors == (0,)
    assert outcomes[0].digest == outcomes[1].digest
    grid = arena.map.grid
    for low, high in ((0, grid.params), (grid.buffer_start, grid.buffer_start + grid.buffers)):
        assert (arena.slot(1)[low:high] == 3.0).all()
    for thing in (arena, *bells, memory):
        thing.close()


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def returning(lender=None, global_step=40):
    return msgspec.structs.replace(attach(), global_step=global_step, loan_of=lender)


def test_its_rate_goes_on_from_the_step_its_first_grant_tells():
    rates = []

    def of_step(position):
        rates.append(position)
        return 0.1

    first = msgspec.structs.replace(grant(7, 0), global_step=100)
    session = Session(returning(), first, grant(8, 2, ((0, 8),)), FINISH)
    state = run(session, job(scheduler=of_step))
    assert rates == [105, 106]  # the round that brought it in had 5 steps of others
    assert state.global_step == 112


def test_a_lent_optimizer_state_is_copied_and_the_copy_removed(tmp_path):
    lender = Session(attach(), grant(1, 0), grant(2, 3, ((0, 12),)), Lend(Rank(1), Row(4)), FINISH)
    lender.loans = str(tmp_path / "loans")
    worker = GpuWorker(job(optimizer=momentum), lender)
    worker.run()
    folder = loan_folder(lender.loans, 4)
    worker._errands.close()
    _await(lambda: lender.link.of(Lent))
    assert lender.link.of(Lent) == [Lent(Rank(1), Row(1), Row(4))]
    made = []

    def noted(params):
        made.append(momentum(params))
        return made[-1]

    borrower = Session(returning(lender=Rank(1)), Finish(Rank(1), "ok", ""))
    borrower.row, borrower.loans = Row(4), lender.loans
    run(borrower, job(optimizer=noted))
    moments = [one["momentum_buffer"] for one in made[0].state.values()]
    assert moments
    assert all(float(one.abs().sum()) > 0 for one in moments if one is not None)
    assert not folder.exists()


def test_without_the_copy_its_optimizer_is_fresh_and_says_so(tmp_path, capsys):
    borrower = Session(returning(lender=Rank(0)), FINISH)
    borrower.loans = str(tmp_path)
    run(borrower, job(optimizer=momentum))
    assert "rejoin: a fresh optimizer, since there is no optimizer-rank0" in capsys.readouterr().err


def _await(ready):
    done = threading.Event()
    for _ in range(2000):
        if ready():
            return
        done.wait(0.01)
    raise AssertionError("nothing was told within 20 s")
