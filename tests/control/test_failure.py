"""The root cause of many failures, and the stop ladder."""

from __future__ import annotations

from flodl_shm.control.failure import FailureReport, root_cause
from flodl_shm.control.shutdown import StopLadder
from flodl_shm.ids import Nanos, Rank


def report(rank: int, kind: str, at: int) -> FailureReport:
    return FailureReport(Rank(rank), kind, "words", Nanos(at))


def test_the_first_report_is_the_cause() -> None:
    reports = [report(1, "ValueError", 20), report(0, "KeyError", 10)]
    assert root_cause(reports) == reports[1]
    assert root_cause([]) is None


def test_a_consequence_is_no_cause_even_if_it_came_first() -> None:
    reports = [report(1, "flodl_shm.errors.PeersLost", 5), report(0, "KeyError", 10)]
    assert root_cause(reports) == reports[1]
    assert root_cause(reports[:1]) == reports[0]


def test_the_ladder_has_three_steps_and_says_what_comes_next() -> None:
    ladder = StopLadder()
    told = [ladder.press("SIGINT") for _ in range(4)]
    assert [event.level for event, _ in told] == [1, 2, 3, 3]
    assert told[0][1] == "SIGINT: stopping after this window; once more to stop now"
    assert told[2][1] == "SIGINT: killing what is left"


def test_steps_that_ask_for_nothing_are_skipped() -> None:
    ladder = StopLadder()
    ladder.skip_to(2)
    ladder.skip_to(1)
    assert ladder.pressed == 2
    assert ladder.press("SIGINT")[0].level == 3
