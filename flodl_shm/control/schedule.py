"""Epochs and what of them is in the consensus: pools, global step, losses, coverage.

An epoch is open until every one of its picks is committed. The next one may open as soon as the
last window of the current one is settled (who contributes is certain then), so at most two are
open at a time. A training that was resumed goes on in the epoch it stopped in, with the picks
that were dealt in it then. Which rank does what is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.checkpoint_meta import OpenEpoch
from flodl_shm.control.chunk_pool import ChunkPool
from flodl_shm.control.epoch_metrics import EpochTally
from flodl_shm.control.messages import EpochClosed
from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.options import Settled


class Epoch:
    """One pass over the data."""

    def __init__(self, number: int, pool: ChunkPool) -> None:
        self.number, self.pool = number, pool
        self.loss_sum = 0.0
        self.loss_count = 0

    @property
    def loss(self) -> float | None:
        """Mean over all batches with a finite loss; None without one."""
        return self.loss_sum / self.loss_count if self.loss_count else None

    def standing(self) -> OpenEpoch:
        """What a checkpoint keeps of it while it is open."""
        return OpenEpoch(
            epoch=self.number,
            picks=self.pool.total,
            dropped=self.pool.dropped,
            done=self.pool.done_spans(),
            loss_sum=self.loss_sum,
            loss_count=self.loss_count,
        )


class Schedule:
    """Where the run stands in its epochs."""

    def __init__(self, plan: Settled, meta: CheckpointMeta | None = None) -> None:
        """From the beginning, or from where the training of `meta` stood."""
        self.plan = plan
        self.global_step = meta.global_step if meta else 0
        self.epochs: dict[int, Epoch] = {}
        self.current: Epoch | None = None
        self.tallies: dict[int, EpochTally] = {}  # of open epochs, and of closed ones not told of
        self.closed = {past.epoch: past for past in meta.closed_epochs} if meta else {}
        self._begun = {past.epoch: past for past in meta.open_epochs} if meta else {}
        self._next = meta.epoch if meta else 0

    def has_next(self) -> bool:
        """True while an epoch is left to open."""
        return self._next < self.plan.epochs

    def open_next(self) -> Epoch:
        """Open the next epoch and make it current."""
        if not self.has_next():
            raise WeBroke(f"no epoch {self._next}: the run has {self.plan.epochs}")
        begun = self._begun.pop(self._next, None)
        self.current = self.epochs[self._next] = self._fresh() if begun is None else _again(begun)
        self.tallies[self._next] = EpochTally()
        self._next += 1
        return self.current

    def _fresh(self) -> Epoch:
        total = self.plan.epoch_picks
        return Epoch(self._next, ChunkPool(total, dropped=self.plan.picks - total))

    def close_finished(self) -> list[EpochClosed]:
        """Close epochs whose picks are all committed, in ascending order."""
        closed = []
        for number in sorted(self.epochs):
            epoch = self.epochs[number]
            if not epoch.pool.finished:
                break
            del self.epochs[number]
            cover = epoch.pool.coverage()
            self.closed[number] = EpochClosed(
                epoch=number,
                picks=cover.picks,
                done_once=cover.done_once,
                duplicated=cover.duplicated,
                missing=cover.missing,
                dropped=cover.dropped,
                loss=epoch.loss,
            )
            closed.append(self.closed[number])
        return closed

    @property
    def lowest_open(self) -> int:
        """The lowest epoch that is not closed; the number of epochs when all are."""
        return min(self.epochs, default=self._next)

    @property
    def begun(self) -> tuple[OpenEpoch, ...]:
        """Open epochs that have picks in the consensus."""
        return tuple(epoch.standing() for epoch in self.epochs.values() if epoch.pool.done)

    @property
    def finished(self) -> bool:
        """True when every epoch is closed."""
        return not self.epochs and not self.has_next()


def _again(begun: OpenEpoch) -> Epoch:
    """An epoch as a checkpoint has it."""
    epoch = Epoch(begun.epoch, ChunkPool.resumed(begun.picks, begun.done, dropped=begun.dropped))
    epoch.loss_sum, epoch.loss_count = begun.loss_sum, begun.loss_count
    return epoch
