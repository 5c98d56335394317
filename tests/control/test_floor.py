"""When the user wants no run with so few ranks."""

from __future__ import annotations

from flodl_shm.control.floor import Breach, breach_of
from flodl_shm.control.ledger import Ledger
from flodl_shm.control.options import Survival
from flodl_shm.ids import Nanos, Rank, Row


def after(survival: Survival, *dead: int, returning: tuple[int, ...] = ()) -> Breach | None:
    ledger = Ledger(3, max_failures=survival.max_failures)
    for rank in dead:
        ledger.bury(Rank(rank), Row(rank), cause="signal 9", at=Nanos(0))
    return breach_of(ledger, survival, tuple(map(Rank, returning)), Nanos(7))


def test_without_a_limit_a_run_goes_on() -> None:
    assert after(Survival(), 0, 1) is None


def test_too_many_missing_end_it_and_all_are_named() -> None:
    limited = Survival(max_failures=1, grace_s=2)
    assert after(limited, 2) is None
    assert after(limited, 2, 0) == Breach(
        "2 of 3 ranks are missing, at most 1 may be: rank 0 (signal 9), rank 2 (signal 9)",
        Nanos(2_000_000_007),
    )


def test_who_comes_back_is_not_missing() -> None:
    assert after(Survival(max_failures=0), 2, returning=(2,)) is None


def test_a_part_of_the_ranks() -> None:
    assert after(Survival(max_failures=0.5), 1) is None
    assert after(Survival(max_failures=0.3), 1) is not None


def test_abort_ends_it_at_the_first_death() -> None:
    breach = after(Survival(on_death="abort"), 1)
    assert breach is not None
    assert breach.reason == "rank 1 (signal 9) lost, and --on-death is abort"
