"""When the next round is dealt on top of the one under way."""

from __future__ import annotations

from flodl_shm.control.half_time import HalfTime
from flodl_shm.control.window_ledger import Window
from flodl_shm.ids import Nanos, Rank, Round

S = 1_000_000_000


def flying(*numbers: int) -> list[Window]:
    return [
        Window(
            round=Round(number),
            epoch=0,
            roster=(),
            anchor_rank=Rank(0),
            anchor_steps=10,
            planned={},
            ceiling={},
            exact=False,
        )
        for number in numbers
    ]


def test_a_round_is_dealt_on_top_when_half_of_the_window_is_over() -> None:
    half = HalfTime(matters=True)
    assert half.holds(flying(3), S, Nanos(10 * S)) == "half of round 3 is not over"
    assert half.next_at == 10.5 * S
    assert half.holds(flying(3), 9 * S, Nanos(10 * S + 1)), "it began at the first question"
    assert half.next_at == 10.5 * S
    assert half.holds(flying(3), S, Nanos(int(10.5 * S))) == ""
    assert half.next_at is None
    assert half.holds(flying(4), S, Nanos(11 * S))


def test_nobody_waits_for_it_where_nothing_is_won() -> None:
    assert HalfTime(matters=False).holds(flying(3), S, Nanos(0)) == ""
    half = HalfTime(matters=True)
    assert half.holds(flying(3, 4), S, Nanos(0)) == "", "round 4 has not begun"
    assert half.holds(flying(3), 0.0, Nanos(0)) == "", "nobody knows how long it lasts"
    assert half.holds(flying(3), 0.04 * S, Nanos(0)) == "", "it is soon over"
    assert half.next_at is None
