"""The dead-rank ledger: one death counted once, incarnations, and the floor."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flodl_shm.control.ledger import Death, FloorVerdict, Ledger
from flodl_shm.errors import BadConfig, WeBroke


def test_a_death_is_counted_once_whoever_reports_it():
    ledger = Ledger(3)
    death, reason = ledger.bury(1, 1, cause="signal 9", at=50)
    assert death == Death(1, 1, 0, "signal 9", 50)
    assert reason == "rank 1 lost: signal 9; 2 of 3 live"
    assert ledger.bury(1, 1, cause="socket closed", at=51) == (
        None, "row 1 of rank 1 is no living incarnation: counted before",
    )  # fmt: skip
    assert ledger.deaths == [death]
    assert ledger.living == {0: 0, 2: 2}


def test_the_end_of_a_finished_rank_is_no_death():
    ledger = Ledger(2)
    assert ledger.finish(1, 1)
    assert not ledger.finish(1, 1)
    assert ledger.bury(1, 1, cause="exit 0", at=1) == (
        None, "rank 1 ended after its work was done",
    )  # fmt: skip
    assert ledger.lost == ()


def test_a_rank_comes_back_in_a_new_row():
    ledger = Ledger(2)
    ledger.bury(0, 0, cause="signal 9", at=1)
    assert ledger.admit(0, 2) == "rank 0 is back as incarnation 1 in row 2"
    assert ledger.is_living(0, 2)
    assert not ledger.is_living(0, 0)
    assert ledger.bury(0, 0, cause="late news", at=2)[0] is None
    assert ledger.bury(0, 2, cause="signal 9", at=3)[0].incarnation == 1
    assert ledger.row(0) == 2


@pytest.mark.parametrize(("rank", "row"), [(1, 7), (0, 0), (0, 1)])
def test_a_living_rank_or_a_used_row_cannot_be_admitted(rank, row):
    ledger = Ledger(2)
    ledger.bury(0, 0, cause="signal 9", at=1)
    with pytest.raises(WeBroke, match=r"not dead|used before"):
        ledger.admit(rank, row)


def test_a_finished_rank_cannot_be_admitted():
    ledger = Ledger(2)
    ledger.finish(0, 0)
    with pytest.raises(WeBroke, match="rank 0 cannot come back: row 0 is not dead"):
        ledger.admit(0, 5)


@pytest.mark.parametrize(
    ("max_failures", "limit"), [(None, 7), (0, 0), (2, 2), (99, 7), (1.0, 7), (0.5, 4), (0.3, 2)]
)
def test_the_floor(max_failures, limit):
    ledger = Ledger(8, max_failures=max_failures)
    for rank in range(limit):
        ledger.bury(rank, rank, cause="signal 9", at=rank)
    assert ledger.verdict() == (
        FloorVerdict.GO_ON, f"{limit} of 8 ranks are missing, up to {limit} may be",
    )  # fmt: skip
    ledger.bury(7, 7, cause="signal 9", at=9)
    assert ledger.verdict() == (
        FloorVerdict.BREACHED, f"{limit + 1} of 8 ranks are missing, at most {limit} may be",
    )  # fmt: skip
    assert ledger.verdict(returning=[7])[0] is FloorVerdict.GO_ON


@pytest.mark.parametrize("max_failures", [-1, -0.5, 0.0, 1.5, float("nan")])
def test_a_floor_that_cannot_be_meant(max_failures):
    with pytest.raises(BadConfig, match="max failures"):
        Ledger(4, max_failures=max_failures)


def test_a_world_has_ranks():
    with pytest.raises(BadConfig, match="world of 0"):
        Ledger(0)


class Lives(RuleBasedStateMachine):
    """Ranks die, come back and finish, and are reported late and often."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(3)
        self.next_row = 3
        self.died = []

    @rule(rank=st.integers(0, 2), row=st.integers(0, 9))
    def bury(self, rank, row):
        death, _ = self.ledger.bury(rank, row, cause="signal 9", at=0)
        if death:
            assert (rank, row) not in self.died
            self.died.append((rank, row))

    @precondition(lambda self: self.ledger.lost)
    @rule(data=st.data())
    def come_back(self, data):
        self.ledger.admit(data.draw(st.sampled_from(self.ledger.lost)), self.next_row)
        self.next_row += 1

    @rule(rank=st.integers(0, 2), row=st.integers(0, 9))
    def finish(self, rank, row):
        lived = self.ledger.is_living(rank, row)
        assert self.ledger.finish(rank, row) == lived
        assert not self.ledger.is_living(rank, row)

    @invariant()
    def each_rank_is_in_one_place(self):
        ledger = self.ledger
        assert not set(ledger.living) & set(ledger.lost)
        assert len(ledger.deaths) == len(self.died)
        assert sum(ledger.incarnation(r) + 1 for r in range(3)) == self.next_row
        assert all(ledger.is_living(rank, row) for rank, row in ledger.living.items())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
