"""One question at each batch boundary: another batch in this window?"""

from __future__ import annotations

import pytest

from flodl_shm.control.messages import Grant, Seat
from flodl_shm.control.window_turn import AnchorView, takes_another
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot

MS = 1_000_000


def grant(planned: int = 20, ceiling: int = 42, anchor_steps: int = 10) -> Grant:
    seats = (Seat(Rank(0), Row(0), Slot(0)), Seat(Rank(1), Row(1), Slot(1)))
    return Grant(
        Rank(0), Round(3), 0, seats, Rank(1), anchor_steps, planned=planned, ceiling=ceiling
    )


def anchor_view(done: int = 5, *, alive: bool = True, pace_ms: float = 40.0) -> AnchorView:
    return AnchorView(alive, done, Nanos(done * 40 * MS), int(pace_ms * MS))


def goes(done: int, now_ms: float, view: AnchorView | None, **changes: int) -> bool:
    now = Nanos(int(now_ms * MS))
    return takes_another(grant(**changes), done=done, now=now, own_ns=20 * MS, anchor_view=view)


def test_the_anchor_rank_does_its_steps() -> None:
    assert goes(9, 0, None)
    assert not goes(10, 0, None)


def test_others_go_on_while_half_a_batch_fits() -> None:
    assert goes(19, 389, anchor_view(9))
    assert not goes(19, 391, anchor_view(9))


def test_nobody_goes_beyond_the_ceiling() -> None:
    assert not goes(42, 0, anchor_view(1))


def test_every_rank_does_at_least_one() -> None:
    assert goes(0, 10_000, anchor_view(10))


def test_it_ends_when_the_anchor_rank_has_done_its_steps() -> None:
    assert not goes(3, 0, anchor_view(10))


def test_an_unknown_pace_stops_nobody() -> None:
    assert goes(30, 10_000, anchor_view(0, pace_ms=0))


@pytest.mark.parametrize(("done", "want"), [(19, True), (20, False)])
def test_without_the_anchor_rank_the_plan_counts(done: int, want: bool) -> None:
    assert goes(done, 10_000, anchor_view(alive=False)) is want


@pytest.mark.parametrize(("done", "want"), [(19, True), (20, False)])
def test_an_exact_window_is_counted(done: int, want: bool) -> None:
    assert goes(done, 10_000, anchor_view(), ceiling=20) is want
