"""The worker that made a rank fail is found in the traceback, and its end put into words."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from flodl_shm.engine.loader_death import note_dead_workers


@dataclass
class Worker:
    pid: int
    exitcode: int | None


class Batches:
    """As torch's iterator over a loader with workers: it holds them, and raises."""

    def __init__(self, *codes: int | None) -> None:
        self._workers = [Worker(100 + number, code) for number, code in enumerate(codes)]

    def __next__(self):
        raise RuntimeError("a worker exited unexpectedly")


Batches.__module__ = "torch.utils.data.dataloader"


def notes_of(iterator) -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    note_dead_workers(caught.value)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGBUS, "signal 7 (SIGBUS): most likely shared memory is full ("),
        (-signal.SIGKILL, "signal 9 (SIGKILL): somebody killed it, or the kernel did for want of"),
        (-signal.SIGSEGV, "signal 11 (SIGSEGV)"),
        (3, "exit 3; why, it said in the rank's stderr.log"),
    ],
)
def test_the_dead_worker_is_named_with_its_end(code, words):
    (note,) = notes_of(Batches(None, code, 0))
    assert note.startswith(f"DataLoader worker 1 (pid 101) ended with {words}")


def test_living_workers_and_other_errors_get_no_note():
    assert notes_of(Batches(None, 0)) == []
    error = RuntimeError("never raised")
    note_dead_workers(error)
    assert not hasattr(error, "__notes__")


def test_what_only_looks_like_a_loader_is_left_alone():
    class Users(Batches):
        pass

    assert notes_of(Users(-9)) == []
