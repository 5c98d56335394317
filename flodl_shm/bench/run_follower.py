"""A run as its journal tells it, followed from another process while it goes on.

Knows who trains, how long windows last, and whether everybody has arrived in the round under way:
what one must know to strike at a chosen moment. Reads files only; the run does not notice.
"""

from __future__ import annotations

import re
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    Arrived,
    Attached,
    Committed,
    Died,
    End,
    Issued,
    Ready,
    Rejoined,
)
from flodl_shm.obs import journal

if TYPE_CHECKING:
    from pathlib import Path

    from flodl_shm.ids import Nanos, Rank, Round, Row

FOLLOWED = (Arrived, Attached, Committed, Died, End, Issued, Ready, Rejoined)
_wanted = re.compile(
    rf'"message":\{{"type":"(?:{"|".join(kind.__name__ for kind in FOLLOWED)})"'.encode()
)
GAPS = 5  # windows whose median is the length of one
FIRST_GUESS_S = 0.2  # of a window's length, before there are two commits


class RunFollower:
    """One run under `root`, which holds no other. `look` reads what is new."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place: Path | None = None
        self._offset = 0
        self.ended = False
        self.living: dict[Rank, Row] = {}  # attached, or back
        self.commits: list[tuple[Nanos, Committed]] = []
        self.deaths = 0
        self._issued: Issued | None = None
        self._arrived: dict[Round, set[Rank]] = {}

    @property
    def place(self) -> Path | None:
        """The run's directory; None before there is one."""
        if self._place is None:
            found = sorted(path for path in self._root.glob("2*") if path.is_dir())
            self._place = found[0] if found else None
        return self._place

    def look(self) -> None:
        """Take what was written since the last call."""
        if self.place is None:
            return
        try:
            with open(self.place / "journal.jsonl", "rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if _wanted.search(line):
                self._take(journal.decode(line))

    def _take(self, record: journal.Record) -> None:
        match record.message:
            case Attached(rank=rank, row=row) if not self.commits:
                self.living[rank] = row
            case Rejoined(rank=rank, row=row):
                self.living[rank] = row
            case Died(rank=rank, row=row) if self.living.get(rank) == row:
                del self.living[rank]
                self.deaths += 1
            case Issued() as issued:
                self._issued = issued
            case Arrived(rank=rank, round=number):
                self._arrived.setdefault(number, set()).add(rank)
            case Committed() as commit:
                self.commits.append((record.at, commit))
                self._arrived.pop(commit.round, None)
            case End():
                self.ended = True
            case _:
                pass

    @property
    def training(self) -> list[Rank]:
        """Living ranks whose work is in the newest commit."""
        newest = self.commits[-1][1].contributors if self.commits else ()
        return [rank for rank in sorted(self.living) if rank in newest]

    @property
    def in_reduce(self) -> bool:
        """Whether every living rank has arrived in a round that has not closed."""
        return bool(self.living) and any(
            ranks >= self.living.keys() for ranks in self._arrived.values()
        )

    @property
    def window_s(self) -> float:
        """From one commit to the next, lately."""
        ends = [at for at, _ in self.commits[-GAPS - 1 :]]
        gaps = [later - sooner for sooner, later in pairwise(ends)]
        return statistics.median(gaps) / 1e9 if gaps else FIRST_GUESS_S

    def pid(self, rank: Rank) -> int:
        """The process of the rank's newest incarnation. Raises OSError without one."""
        assert self.place is not None
        return int((self.place / "ranks" / f"rank{rank}" / "pid").read_text().split()[0])

    def wait(self, pause_s: float) -> None:
        """Let a little time go by, then look."""
        time.sleep(pause_s)
        self.look()
