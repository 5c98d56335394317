"""Who is given up and when, with a made-up clock and a host that is only played."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from flodl_shm.engine import watch as watches
from flodl_shm.engine.hang import BRIDGE, CLASSES, OURS, TRAINERS, Place, in_lines, place_of
from flodl_shm.engine.watch import Watch
from flodl_shm.ids import Nanos, Rank
from flodl_shm.proc.stacks import parse

MS = 1_000_000
WORDS = {Rank(1): "its arrival in round 3"}


@dataclass
class Cells:
    beat: int = 0
    errand: int = 0


@dataclass
class Host:
    """One rank, number 1."""

    cells: Cells = field(default_factory=Cells)
    mark: int = 0

    def __post_init__(self):
        self.members = {1: SimpleNamespace(row=0)}
        self.supervisor = SimpleNamespace(children={1: None})
        cell = SimpleNamespace
        self.block = SimpleNamespace(
            beat=lambda row: cell(load=lambda: self.cells.beat),
            errand=lambda row: cell(load=lambda: self.cells.errand),
        )
        self.arena = None

    def alive(self):
        return [Rank(1)]

    def progress_mark(self, rank):
        return self.mark


@pytest.fixture
def world(monkeypatch):
    """The host, whether it is stopped, and what answer it gives."""
    state = SimpleNamespace(host=Host(), is_stopped=False, answer="", asked=0, until=10**18)

    def ask(host, rank, now):
        state.asked += 1
        return SimpleNamespace(poll=lambda now: state.answer if now >= state.until else None)

    monkeypatch.setattr(watches, "is_stopped", lambda child: state.is_stopped)
    monkeypatch.setattr(watches, "ask_for_stacks", ask)
    return state


def looks(watch, world, until_ms, awaited=WORDS, step_ms=500, beats=True):
    """Look every half second; what was found, with the time."""
    found = []
    for ms in range(0, until_ms, step_ms):
        if beats:
            world.host.cells.beat = 1 + ms * MS
        found += [(ms, lost) for lost in watch.look(world.host, awaited, Nanos(1 + ms * MS))]
    return found


def test_a_rank_nobody_waits_for_may_rest_for_ever(world):
    assert looks(Watch(5, 1, 1), world, 20_000, awaited={}) == []
    assert world.asked == 0


def test_who_stalls_is_asked_first_and_given_up_with_the_answer_once(world):
    world.until = 4_300 * MS
    ((ms, lost),) = looks(Watch(5, 3, 600), world, 10_000, step_ms=100)
    assert (ms, world.asked) == (4_300, 1)
    assert lost.place == Place("unknown")
    assert lost.why == (
        "no progress for 3 s in unknown; its arrival in round 3 is waited for; it gave no stacks"
    )


def test_who_moves_while_it_is_asked_is_spared(world):
    watch = Watch(5, 1, 600)
    assert looks(watch, world, 1_500) == []
    assert world.asked == 1
    world.until, world.host.mark = 0, 7
    assert watch.look(world.host, WORDS, Nanos(1_600 * MS)) == []
    assert watch.look(world.host, WORDS, Nanos(2_500 * MS)) == []
    assert world.asked == 1


def test_an_errand_has_its_own_limit_first(world):
    world.until, world.host.cells.errand = 0, 5
    ((ms, lost),) = looks(Watch(5, 1, 3), world, 10_000)
    assert ms == 4_000
    assert lost.place == Place("callback")
    assert "no progress for 4 s in callback" in lost.why


def test_silence_alone_is_no_stop_and_a_stop_alone_is_no_silence(world):
    assert looks(Watch(1, 60, 60), world, 20_000, beats=False) == []
    world.is_stopped = True
    assert looks(Watch(1, 60, 60), world, 5_000) == []


def test_a_stopped_rank_is_given_up_on_time_without_being_asked(world):
    world.is_stopped, world.host.cells.beat = True, 1
    watch, now = Watch(1, 60, 60), 1
    while not (lost := watch.look(world.host, {}, Nanos(now))):
        now = watch.due
    assert now - 1 == 1_000 * MS
    assert lost[0].why == "stopped, no heartbeat for 1.0 s"
    assert lost[0].place is None
    assert watch.look(world.host, {}, Nanos(now + 100 * MS)) == []


def test_what_passed_while_nobody_watched_does_not_count(world):
    world.is_stopped, world.until = True, 0
    watch = Watch(1, 3, 60)
    world.host.cells.beat = 1
    assert watch.look(world.host, WORDS, Nanos(1)) == []
    later = 60_000 * MS
    assert watch.look(world.host, WORDS, Nanos(later)) == []
    assert watch.look(world.host, WORDS, Nanos(later + 900 * MS)) == []
    assert len(watch.look(world.host, WORDS, Nanos(later + 1_000 * MS))) == 1


# ---- what stacks say -----------------------------------------------------------------------------


def answer_of(*frames):
    """faulthandler's text: a thread that beats, and the one that trains."""
    calls = "\n".join(
        f'  File "{file}", line {line} in {function}' for file, line, function in frames
    )
    bridge = f'  File "{OURS}/engine/rank_session.py", line 9 in _run'
    head = "Thread 0x{:016x} (most recent call first):\n"
    return f"{head.format(1)}{bridge}\n\n{head.format(2)}{calls}\n"


WORKER = (f"{OURS}/train/gpu_worker.py", 140, "run")
CASES = {
    "data": (f"{OURS}/train/data/source.py", 80, "fetch"),
    "callback": (f"{OURS}/train/callbacks.py", 10, "_run"),
    "reduce": (f"{OURS}/train/shard.py", 10, "work"),
    "step": (f"{OURS}/train/step.py", 10, "step"),
    "unknown": WORKER,
}


@pytest.mark.parametrize("cause", CASES)
def test_the_innermost_file_of_ours_says_the_class_and_the_users_line_is_named(cause):
    user = ("/home/me/train.py", 12, "__getitem__")
    answer = answer_of((threading.__file__, 3, "wait"), user, CASES[cause], WORKER)
    place = place_of(answer, "unknown")
    assert place == Place(cause, *user)
    assert place.words() == f"{cause} (train.py:12 in __getitem__)"


def test_a_fetch_of_the_window_is_data_and_the_users_own_loop_a_step():
    window = (f"{OURS}/train/window.py", 5, "fetch")
    assert place_of(answer_of(window, WORKER), "unknown").cause == "data"
    loop = ("/home/me/train.py", 3, "<module>"), (f"{OURS}/engine/script.py", 5, "run_script")
    assert place_of(answer_of(*loop), "unknown").cause == "step"


def test_files_that_say_a_class_are_there():
    named = [*CLASSES, *TRAINERS, BRIDGE[0]]
    assert [name for name in named if not (OURS / name).exists()] == []


def test_without_stacks_the_guess_stands():
    assert place_of("", "reduce") == Place("reduce")
    assert place_of("no stack\n", "reduce").words() == "reduce"


def test_for_the_screen_the_thread_that_beats_is_left_out():
    lines = in_lines(Rank(3), answer_of(WORKER))
    assert lines[0] == f"rank 3, training thread ({parse(answer_of(WORKER))[1].thread}), " + (
        "innermost call last:"
    )
    assert len(lines) == 2
    assert in_lines(Rank(3), "") == ["rank 3 gave no stacks: it is stopped, or has not begun"]
