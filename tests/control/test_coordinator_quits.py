"""A rank whose script has left the training: alive, and of no more use to the run."""

from __future__ import annotations

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    Attached,
    Died,
    End,
    Finished,
    Note,
    Quit,
    Ready,
    Stop,
)
from flodl_shm.control.options import Wishes
from flodl_shm.ids import Nanos, Rank, Row


def started() -> tuple[Coordinator, list[Action]]:
    """Two ranks that train; rank 1 quits, and the shell has told of it."""
    mind = Coordinator(Wishes(batch_size=1, epochs=1, policy="sync"), 2)
    for rank in (0, 1):
        mind.step(Ready(Rank(rank), Row(rank), "d", 8, 0, samples=4, device="cpu"), Nanos(1))
    for rank in (0, 1):
        mind.step(Attached(Rank(rank), Row(rank)), Nanos(2))
    said = mind.step(Quit(Rank(1), Row(1), "KeyError: 'label'"), Nanos(3))
    said += mind.step(Died(Rank(1), Row(1), "left the training: KeyError: 'label'"), Nanos(4))
    return mind, said


def test_the_others_go_on() -> None:
    mind, said = started()
    assert list(mind.living) == [0]
    assert any(isinstance(one, Note) and "left the training" in one.text for one in said)
    assert not any(isinstance(one, End) for one in said)


def test_an_exception_that_ends_its_process_ends_the_run() -> None:
    mind, _ = started()
    failed = Died(Rank(1), Row(1), "KeyError: 'label'", user_error=True)
    (end,) = mind.step(failed, Nanos(5))
    assert isinstance(end, End)
    assert (end.status, end.exit_code) == ("failed", 1)
    assert end.reason == "rank 1 failed: KeyError: 'label'"


def test_an_orderly_end_of_its_process_is_no_news() -> None:
    mind, _ = started()
    assert not any(
        isinstance(one, End | Note) and "rank 1" in str(one)
        for one in mind.step(Died(Rank(1), Row(1), "exit 0"), Nanos(5))
    )
    assert list(mind.living) == [0]


def test_an_error_after_its_work_was_done_does_not_end_the_run() -> None:
    mind = Coordinator(Wishes(batch_size=1, epochs=1), 2)
    mind.step(Ready(Rank(0), Row(0), "d", 8, 0, samples=4, device="cpu"), Nanos(1))
    mind.step(Ready(Rank(1), Row(1), "d", 8, 0, samples=4, device="cpu"), Nanos(1))
    mind.step(Stop(level=1, why="interrupt"), Nanos(2))
    mind.step(Attached(Rank(0), Row(0)), Nanos(3))
    mind.step(Attached(Rank(1), Row(1)), Nanos(3))
    mind.step(Finished(Rank(1), Row(1), "same"), Nanos(4))
    said = mind.step(Died(Rank(1), Row(1), "KeyError", user_error=True), Nanos(5))
    assert not any(isinstance(one, End) for one in said)
