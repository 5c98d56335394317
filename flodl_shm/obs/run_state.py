"""How a run stands, from its files alone: nothing of it is asked, locked or slowed down.

A run is under way while somebody holds the lock on its journal. Without a writer it has ended;
then it has a summary, or its launcher was killed. Of the journal only the lines that change this
picture are decoded. Which of the processes live is for the caller to find out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from flodl_shm.control.messages import (
    Attached,
    BuildArena,
    Committed,
    Died,
    End,
    EpochClosed,
    Evaluated,
    Finished,
    Ready,
    Rejoined,
)
from flodl_shm.errors import BadConfig
from flodl_shm.obs import journal
from flodl_shm.obs.journal import Header
from flodl_shm.obs.run_dir import JOURNAL, METRICS, RESOURCES, SETTINGS, SUMMARY
from flodl_shm.obs.tally import RunFacts, Tally

if TYPE_CHECKING:
    from pathlib import Path

    from flodl_shm.ids import Nanos, Rank

TELLING: Final = (
    Attached, BuildArena, Committed, Died, End, EpochClosed, Evaluated, Finished, Ready, Rejoined,
)  # fmt: skip
TAIL_BYTES: Final = 256 * 1024  # holds the last line, with 256 ranks too


@dataclass(frozen=True, slots=True)
class RunState:
    """What the files say."""

    path: Path
    header: Header
    tally: Tally
    writer: int | None  # process id of the launcher; 0: it cannot be seen from here; None: ended
    settings: dict[str, Any]
    summary: dict[str, Any]  # empty while there is none
    figures: dict[str, Any]  # the newest line of metrics.jsonl
    samples: dict[Rank, dict[str, Any]]  # of each rank in the newest line of resources.jsonl
    pids: dict[Rank, tuple[int, int]]  # process id and incarnation
    first_commit_at: Nanos | None

    @property
    def word(self) -> str:
        """running, killed, or how it ended: ok, failed, stopped."""
        if self.writer is not None:
            return "running"
        return str(self.summary.get("status", "killed"))

    @property
    def picks_planned(self) -> int:
        """Of the whole run; 0 before the plan is settled."""
        plan = self.tally.plan
        return plan.epoch_picks * plan.epochs if plan else 0

    @property
    def picks_per_s(self) -> float | None:
        """From the first meeting, before which nothing is trained, to the newest."""
        last, first = self.tally.last_commit_at, self.first_commit_at
        if last is None or first is None or last <= first:
            return None
        return self.tally.picks / ((last - first) / 1e9)


def read_state(path: Path) -> RunState:
    """Read the run in `path`. Raises BadConfig if its journal cannot be read."""
    file = path / JOURNAL
    try:
        writer = journal.writer_of(file)  # first: a run that ends meanwhile has all its lines
        lines = journal.read(file, only=TELLING)
        header = next(lines, None)
    except OSError as error:
        raise BadConfig(f"cannot read {file}: {error.strerror}") from None
    if not isinstance(header, Header):
        raise BadConfig(f"{file} is empty: the run has not begun")
    settings = _object(path / SETTINGS)
    tally = Tally(_facts(header, settings))
    first: Nanos | None = None
    for line in lines:
        assert not isinstance(line, Header)  # only the first line is one
        tally.feed(line.message, line.at)
        if first is None and isinstance(line.message, Committed):
            first = line.at
    newest = _last_line(path / RESOURCES)
    return RunState(
        path=path,
        header=header,
        tally=tally,
        writer=writer,
        settings=settings,
        summary=_object(path / SUMMARY),
        figures=_last_line(path / METRICS),
        samples={one["rank"]: one for one in newest.get("ranks", [])},
        pids={rank: found for rank in tally.ranks if (found := _pid(path, rank))},
        first_commit_at=first,
    )


def _facts(header: Header, settings: dict[str, Any]) -> RunFacts:
    options = settings.get("options", {})
    words = str(options.get("devices", {}).get("value", "")).split(",")
    size = header.world_size
    return RunFacts(
        workload=str(settings.get("title", "?")),
        backend=str(options.get("backend", {}).get("value", "?")),
        world_size=size,
        devices=tuple(words) if len(words) == size else ("?",) * size,
        started_at=header.started_at,
    )


def _object(path: Path) -> dict[str, Any]:
    """A JSON file; empty where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def _last_line(path: Path) -> dict[str, Any]:
    """The newest whole line of a JSONL file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            whole = file.read().split(b"\n")[:-1]
        return msgspec.json.decode(whole[-1], type=dict[str, Any])
    except (OSError, IndexError, msgspec.MsgspecError):
        return {}


def _pid(path: Path, rank: Rank) -> tuple[int, int] | None:
    for place in (path, path.parent):  # a script's later runs lie inside the first, with its ranks
        try:
            pid, incarnation = (place / "ranks" / f"rank{rank}" / "pid").read_text().split()[:2]
            return int(pid), int(incarnation)
        except (OSError, ValueError):
            continue
    return None
