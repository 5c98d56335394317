"""metrics.jsonl: a line for each epoch that closes, and one more when it is evaluated.

For plots and for `tail -f`. A line has where the run stands by then (a view of the tally) and all
the script was told of the epoch: the fields of EpochMetrics by their names, tuples by rank. A line
with `evaluated` true has the value, null if that is nan. A full disk stops the file with one
warning, as it does the journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.messages import EpochClosed, EpochMetrics
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flodl_shm.control.messages import Action
    from flodl_shm.ids import Nanos
    from flodl_shm.obs.tally import Tally


def epoch_figures(tally: Tally, epoch: EpochClosed, *, now: Nanos) -> dict[str, object]:
    """Where the run stands as this epoch closes. `he` and rates are over the training so far."""
    efficiency = tally.efficiency()
    commit = tally.last_commit
    return {
        "epoch": epoch.epoch,
        "at_s": round((now - tally.facts.started_at) / 1e9, 6),
        "loss": epoch.loss,
        "picks": epoch.picks,
        "picks_total": tally.picks,
        "picks_per_s": tally.picks_per_s,
        "global_step": commit.global_step if commit else 0,
        "reduces": len(tally.reduces_ns),
        "divergence": commit.divergence if commit else None,
        "he": efficiency.he,
        "waste": efficiency.waste,
        "shares": {str(rank): round(tally.share(rank), 4) for rank in tally.ranks},
        "living": len(tally.survivors),
    }


class EpochLines:
    """Makes the lines out of the coordinator's actions, in order."""

    def __init__(self, tally: Tally, write: Callable[[dict[str, object]], None]) -> None:
        self._tally = tally
        self._write = write
        self._closed: dict[str, object] | None = None  # figures of an epoch nobody was told of yet
        self._standing: dict[str, object] = {}  # where the run stood at the last epoch's end
        self._told = b""

    def feed(self, action: Action, now: Nanos) -> None:
        """Take any action; an epoch's are written as soon as the first rank is told of it."""
        if isinstance(action, EpochClosed):
            self.flush()
            self._closed = self._standing = epoch_figures(self._tally, action, now=now)
        elif isinstance(action, EpochMetrics):
            self._tell(action, now)

    def flush(self) -> None:
        """Write what is known of an epoch that closed when no rank was left to be told."""
        if self._closed is not None:
            self._write(self._closed)
            self._closed = None

    def _tell(self, news: EpochMetrics, now: Nanos) -> None:
        same = msgspec.structs.replace(news, rank=Rank(0), calls=False)
        told = msgspec.msgpack.encode(same)  # bytes, since nan equals nothing, itself included
        if told == self._told:
            return  # what another rank is told
        self._told, self._closed = told, None
        fields = msgspec.structs.asdict(same)
        del fields["rank"], fields["calls"]
        at_s = round((now - self._tally.facts.started_at) / 1e9, 6)
        evaluated = news.value is not None
        self._write({**self._standing, **fields, "at_s": at_s, "evaluated": evaluated})


class MetricsFile:
    """Appends a line per epoch. `warn` is told, once, when the disk refuses."""

    def __init__(self, path: Path, *, warn: Callable[[str], None]) -> None:
        """Create or continue the file. Raises OSError when it cannot be opened."""
        self._path = path
        self._warn = warn
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._broken = False

    def write(self, figures: dict[str, object]) -> None:
        """Append one line. Never raises because of the disk."""
        if self._broken:
            return
        try:
            self._file.write(msgspec.json.encode(figures) + b"\n")
        except OSError as error:
            self._broken = True
            self._warn(f"{self._path} ends here ({error.strerror}); the training goes on")

    def close(self) -> None:
        """Give the file back to the system; twice is harmless."""
        self._file.close()
