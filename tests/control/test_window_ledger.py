"""The ledger of windows refuses what cannot have happened."""

from __future__ import annotations

import pytest

from flodl_shm.control.messages import Arrived, Left, Seat
from flodl_shm.control.window_ledger import Window, WindowLedger
from flodl_shm.errors import PeerBroke, WeBroke
from flodl_shm.ids import Rank, Round, Row, Slot


def window(number: int = 1, joiner: bool = False) -> Window:
    seats = tuple(Seat(Rank(r), Row(r), Slot(r), joiner=joiner and r == 1) for r in (0, 1))
    return Window(Round(number), 0, seats, Rank(0), 1, {}, {}, exact=True)


def arrived(rank: int, number: int = 1) -> Arrived:
    return Arrived(Rank(rank), Row(rank), Round(number), steps=1, batches=1, picks=1)


def test_who_is_awaited_and_who_contributed() -> None:
    ledger = WindowLedger()
    ledger.issue(window())
    ledger.arrive(arrived(1))
    entry = ledger.get(Round(1))
    assert entry is not None
    assert entry.awaited({Rank(0), Rank(1)}) == [0]
    assert entry.awaited({Rank(1)}) == []
    assert entry.contributors == (1,)
    assert ledger.unsettled() == [entry]


def test_a_joiner_arrives_and_contributes_nothing() -> None:
    ledger = WindowLedger()
    ledger.issue(window(joiner=True))
    ledger.arrive(arrived(0))
    ledger.arrive(arrived(1))
    entry = ledger.get(Round(1))
    assert entry is not None
    assert entry.contributors == (0,)


def test_rounds_are_issued_without_gaps() -> None:
    with pytest.raises(WeBroke, match="round 2 issued out of order, 1 is next"):
        WindowLedger().issue(window(2))


def test_an_arrival_must_be_one_s_own_and_the_first() -> None:
    ledger = WindowLedger()
    ledger.issue(window())
    ledger.arrive(arrived(0))
    with pytest.raises(PeerBroke, match="arrived twice"):
        ledger.arrive(arrived(0))
    with pytest.raises(PeerBroke, match="not its own"):
        ledger.arrive(arrived(3))
    with pytest.raises(PeerBroke, match="not its own"):
        ledger.arrive(arrived(1, number=2))


def test_leaving_late_is_fine_leaving_early_is_not() -> None:
    ledger = WindowLedger()
    ledger.issue(window())
    entry = ledger.get(Round(1))
    assert entry is not None
    left = Left(Rank(0), Row(0), Round(1), (Rank(0),))
    ledger.leave(left)
    assert entry.left == {Rank(0): left}
    ledger.close(entry)
    ledger.leave(left)
    assert list(ledger.open()) == []
    with pytest.raises(PeerBroke, match="never issued"):
        ledger.leave(Left(Rank(0), Row(0), Round(2), ()))
