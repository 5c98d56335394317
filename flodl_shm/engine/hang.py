"""What a rank that gets nowhere is doing: its cause class, the user's line, and words for people.

Made of the stacks it has given, and where there are none of what it had published before. Whether
it is to be given up is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import flodl_shm
from flodl_shm.proc.error_file import ErrorReport, is_users
from flodl_shm.proc.stacks import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flodl_shm.ids import Nanos, Rank, Row
    from flodl_shm.proc.stacks import Frame, Stack

STALLED: Final = "Stalled"  # the kind in an error file, and whose file it is: the launcher's
NOWHERE: Final = "unknown"
OURS: Final = Path(flodl_shm.__file__).parent

# Files of ours, innermost call first: the first that is here says what the rank is at.
CLASSES: Final = {
    "train/data/": "data",
    "train/callbacks.py": "callback",
    "train/time_limit.py": "callback",
    "train/errands.py": "callback",
    "train/checkpoint/": "callback",
    "train/reduce.py": "reduce",
    "train/shard.py": "reduce",
    "train/replica.py": "reduce",
    "train/step.py": "step",
    "train/lr.py": "step",
    "train/window.py": "step",
    "train/cooperative.py": "step",
    "train/gpu_worker.py": NOWHERE,  # building, attaching, between two windows
    "engine/script.py": "step",  # in the user's own loop, between two calls of ours
}
FETCHES: Final = {"fetch", "batches", "next_batch"}  # functions of these files that get data
TRAINERS: Final = ("train/gpu_worker.py", "train/cooperative.py")
BRIDGE: Final = ("engine/rank_session.py", "_run")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    cause: str  # step, data, callback, reduce, unknown
    file: str = ""
    line: int = 0
    function: str = ""

    def words(self) -> str:
        """`data (train.py:12 in __getitem__)`."""
        if not self.file:
            return self.cause
        return f"{self.cause} ({Path(self.file).name}:{self.line} in {self.function})"


def place_of(answer: str, guess: str) -> Place:
    """Where the training thread is; `guess` is the cause class without stacks."""
    stack = training_stack(parse(answer))
    if stack is None or not stack.frames:
        return Place(guess)
    users = [frame for frame in stack.frames if is_users(frame.file)]
    frame = (users or stack.frames)[0]
    return Place(_class_of(stack) or guess, frame.file, frame.line, frame.function)


def training_stack(stacks: Sequence[Stack]) -> Stack | None:
    """Of the thread that trains; else of the main thread, which faulthandler writes last."""
    for stack in stacks:
        if any(_ours(frame) in TRAINERS for frame in stack.frames):
            return stack
    return stacks[-1] if stacks else None


def report_of(
    place: Place, answer: str, *, seat: tuple[Rank, Row], pid: int, now: Nanos, why: str
) -> ErrorReport:
    """What the launcher writes in the place of a rank that cannot say anything any more."""
    return ErrorReport(
        rank=seat[0],
        row=seat[1],
        pid=pid,
        cause=place.cause,
        at=now,
        kind=STALLED,
        message=why,
        file=place.file,
        line=place.line,
        stacks={name: stack.text() for name, stack in _named(answer)},
    )


def in_lines(rank: Rank, answer: str) -> list[str]:
    """An answer for the screen, without the thread that only beats."""
    if not answer:
        return [f"rank {rank} gave no stacks: it is stopped, or has not begun"]
    lines = []
    for name, stack in _named(answer):
        if not any((_ours(frame), frame.function) == BRIDGE for frame in stack.frames):
            lines.append(f"rank {rank}, {name}, innermost call last:")
            lines += stack.text().splitlines()
    return lines


def _named(answer: str) -> Iterator[tuple[str, Stack]]:
    """The training thread first."""
    stacks = parse(answer)
    training = training_stack(stacks)
    for stack in sorted(stacks, key=lambda stack: stack is not training):
        what = "training thread" if stack is training else "thread"
        yield f"{what} ({stack.thread})", stack


def _class_of(stack: Stack) -> str:
    for frame in stack.frames:
        file = _ours(frame)
        for known, cause in CLASSES.items():
            if file.startswith(known):
                return "data" if cause == "step" and frame.function in FETCHES else cause
    return ""


def _ours(frame: Frame) -> str:
    """The file inside of this package; empty for another one."""
    path = Path(frame.file)
    return str(path.relative_to(OURS)) if path.is_relative_to(OURS) else ""
