"""Returns of dead ranks: pauses, rows, and the way in."""

from __future__ import annotations

import pytest

from flodl_shm.control.messages import Action, Kill, Note, Quit, Spawn
from flodl_shm.control.options import Survival
from flodl_shm.control.rejoin import Returns, rows_for
from flodl_shm.ids import Nanos, Rank, Row

S = 1_000_000_000


def returns(restarts: int = 3, world: int = 2) -> Returns:
    return Returns(world, Survival(restarts=restarts))


def spawned(actions: list[Action]) -> list[tuple[int, int]]:
    return [(a.rank, a.row) for a in actions if isinstance(a, Spawn)]


def start(book: Returns, at_s: float) -> list[tuple[int, int]]:
    return spawned(list(book.start_due(Nanos(int(at_s * S)))))


def test_a_rank_is_started_after_its_pause_in_a_new_row() -> None:
    book = returns()
    assert book.mourn(Rank(1), Nanos(0), contributed=True) == (
        "it is started again in 0.1 s (restart 1 of 3)"
    )
    assert (book.returning, book.next_at) == ((1,), S // 10)
    assert start(book, 0.05) == []
    assert start(book, 0.1) == [(1, 2)]
    assert book.next_at is None
    assert book.is_outside(Row(2))
    book.admit(Rank(1))
    assert not book.is_outside(Row(2))
    assert book.returning == ()


def test_a_return_is_near_from_its_first_pause_to_its_end_and_after_long_pauses_only_then() -> None:
    book = returns(restarts=9)
    assert not book.is_near(Nanos(0))
    book.mourn(Rank(1), Nanos(0), contributed=True)
    assert book.is_near(Nanos(0))
    assert start(book, 0.1) == [(1, 2)]
    assert book.is_near(Nanos(60 * S))
    list(book.bury(Rank(1), Row(2), "exit 1", Nanos(60 * S)))
    assert not book.is_near(Nanos(60 * S)), "0.2 s from now: rounds go on as ever until then"
    assert book.is_near(Nanos(60 * S + S // 10))


def test_pauses_double_until_an_incarnation_has_contributed() -> None:
    book = returns(restarts=100)
    pauses = []
    for contributed in (False,) * 11 + (True, False):
        book.mourn(Rank(0), Nanos(0), contributed=contributed)
        assert book.next_at is not None
        pauses.append(book.next_at / S)
        assert len(start(book, 1e3)) == 1
        book.admit(Rank(0))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 0.1, 0.2]


def test_there_are_so_many_returns_of_each_rank_and_no_more() -> None:
    book = returns(restarts=1)
    for rank in (0, 1):
        book.mourn(Rank(rank), Nanos(0), contributed=True)
    assert start(book, 1) == [(0, 2), (1, 3)]
    book.admit(Rank(0))
    assert not book.may_return(Rank(0))
    assert book.mourn(Rank(0), Nanos(S), contributed=True) == "it stays dead"
    assert start(book, 100) == []
    assert returns(restarts=0).mourn(Rank(0), Nanos(0), contributed=True) == ""


def test_a_newcomer_that_dies_on_its_way_is_started_again_later() -> None:
    book = returns(restarts=2)
    book.mourn(Rank(1), Nanos(0), contributed=False)
    assert start(book, 1) == [(1, 2)]
    (note,) = book.bury(Rank(1), Row(2), "exit 1", Nanos(S))
    assert isinstance(note, Note)
    assert "lost before it was back: exit 1; it is started again in 0.2 s" in note.text
    assert list(book.bury(Rank(1), Row(2), "told twice", Nanos(S))) == []
    assert start(book, 2) == [(1, 3)]


def test_nobody_comes_back_to_a_run_that_ends() -> None:
    book = returns()
    book.mourn(Rank(0), Nanos(0), contributed=True)
    assert start(book, 1) == [(0, 2)]
    book.mourn(Rank(1), Nanos(S), contributed=True)
    said = list(book.close("the run is ending"))
    assert [a for a in said if isinstance(a, Kill)] == [Kill(Rank(0), Row(2), "the run is ending")]
    assert start(book, 100) == []
    assert list(book.close("again")) == []
    assert list(book.bury(Rank(0), Row(2), "signal 9", Nanos(2 * S))) == []
    assert book.mourn(Rank(0), Nanos(2 * S), contributed=True) == "it stays dead: the run ends"


def test_who_has_left_its_training_is_not_replaced() -> None:
    book = returns()
    book.bar(Rank(0))
    assert book.mourn(Rank(0), Nanos(0), contributed=True) == ""
    book.mourn(Rank(1), Nanos(0), contributed=True)
    start(book, 1)
    book.guide(Quit(Rank(1), Row(2), "over"))
    assert not book.may_return(Rank(1))


@pytest.mark.parametrize(
    ("world", "restarts", "rows"), [(2, 0, 2), (2, 3, 8), (8, 100, 136), (256, 2, 512)]
)
def test_rows_are_reserved_within_reason(world: int, restarts: int, rows: int) -> None:
    assert rows_for(world, restarts) == rows


def test_returns_end_with_the_rows() -> None:
    book = returns(restarts=1000)
    for _ in range(128):
        book.mourn(Rank(0), Nanos(0), contributed=True)
        assert len(start(book, 1)) == 1
        book.admit(Rank(0))
    assert book.mourn(Rank(0), Nanos(0), contributed=True) == "it stays dead"
