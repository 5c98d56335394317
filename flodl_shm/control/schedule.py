"""Epochs and what of them is in the consensus: pools, global step, losses, coverage.

An epoch is open until every one of its picks is committed. The next one may open as soon as the
last window of the current one is settled (who contributes is certain then), so at most two are
open at a time. Which rank does what is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.control.chunk_pool import ChunkPool
from flodl_shm.control.messages import EpochClosed
from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from flodl_shm.control.options import Settled


@dataclass(slots=True)
class Epoch:
    """One pass over the data."""

    number: int
    pool: ChunkPool
    loss_sum: float = 0.0
    loss_count: int = 0

    @property
    def loss(self) -> float | None:
        """Mean over all batches with a finite loss; None without one."""
        return self.loss_sum / self.loss_count if self.loss_count else None


@dataclass(slots=True)
class Schedule:
    """Where the run stands in its epochs."""

    plan: Settled
    global_step: int = 0
    epochs: dict[int, Epoch] = field(default_factory=dict)
    current: Epoch | None = None
    _next: int = 0

    def has_next(self) -> bool:
        """True while an epoch is left to open."""
        return self._next < self.plan.epochs

    def open_next(self) -> Epoch:
        """Open the next epoch and make it current."""
        if not self.has_next():
            raise WeBroke(f"no epoch {self._next}: the run has {self.plan.epochs}")
        total = self.plan.epoch_picks
        pool = ChunkPool(total, dropped=self.plan.picks - total)
        self.current = self.epochs[self._next] = Epoch(self._next, pool)
        self._next += 1
        return self.current

    def close_finished(self) -> list[EpochClosed]:
        """Close epochs whose picks are all committed, in ascending order."""
        closed = []
        for number in sorted(self.epochs):
            epoch = self.epochs[number]
            if not epoch.pool.finished:
                break
            del self.epochs[number]
            cover = epoch.pool.coverage()
            closed.append(
                EpochClosed(
                    epoch=number,
                    picks=cover.picks,
                    done_once=cover.done_once,
                    duplicated=cover.duplicated,
                    missing=cover.missing,
                    dropped=cover.dropped,
                    loss=epoch.loss,
                )
            )
        return closed

    @property
    def finished(self) -> bool:
        """True when every epoch is closed."""
        return not self.epochs and not self.has_next()
