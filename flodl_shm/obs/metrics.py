"""metrics.jsonl: one line per closed epoch, for plots and for `tail -f`.

A view of the tally; nothing reads it back. A full disk stops it with one warning, as it does the
journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flodl_shm.control.messages import EpochClosed
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
