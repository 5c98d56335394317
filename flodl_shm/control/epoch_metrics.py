"""One epoch's figures, rank by rank, from the reports of its windows.

floDl's aggregation: reports are grouped by rank. The loss weighs by batches (the schedule keeps
it, and says it here). A scalar is first averaged over what one rank noted, then over the ranks,
weighted by their batches, so that a rank which notes twice as often does not count twice. Shares
are of batches, throughput is picks over the time of work: steps and data waits, neither waits for
others nor callbacks. Who is told, and when, is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.control.actions import EpochMetrics
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.control.events import Arrived
    from flodl_shm.ids import Nanos

NS_PER_MS = 1e6


@dataclass(slots=True)
class _Share:
    """What one rank has done in the epoch; durations in ns."""

    batches: int = 0
    picks: int = 0
    busy_ns: int = 0
    data_ns: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    noted: dict[str, tuple[float, int]] = field(default_factory=dict)  # name -> (sum, count)

    def add(self, report: Arrived, picks: int) -> None:
        self.batches += report.batches
        self.picks += picks
        self.busy_ns += report.busy_ns
        self.data_ns += report.data_ns
        self.loss_sum += report.loss_sum
        self.loss_count += report.loss_count
        for name, (total, count) in report.scalars.items():
            before = self.noted.get(name, (0.0, 0))
            self.noted[name] = (before[0] + total, before[1] + count)

    @property
    def work_ms(self) -> float:
        return (self.busy_ns + self.data_ns) / NS_PER_MS

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.loss_count if self.loss_count else None

    def scalars(self) -> dict[str, float]:
        """The mean of each name; one without a finite mean is left out."""
        means = {name: total / count for name, (total, count) in self.noted.items() if count}
        return {name: mean for name, mean in sorted(means.items()) if math.isfinite(mean)}


class EpochTally:
    """Of one open epoch: told of its windows, asked once or twice for its figures."""

    def __init__(self) -> None:
        self._began: int | None = None
        self._shares: dict[Rank, _Share] = {}

    def issued(self, at: Nanos) -> None:
        """A window of the epoch is issued; the first one begins it."""
        if self._began is None:
            self._began = at

    def arrived(self, report: Arrived, picks: int, at: Nanos) -> None:
        """`report` is of a window of this epoch in which its rank consumed `picks` picks."""
        if self._began is None:
            self._began = at - report.busy_ns - report.data_ns
        self._shares.setdefault(report.rank, _Share()).add(report, picks)

    def build(
        self, epoch: int, loss: float | None, picks: int, *, devices: Sequence[str], at: Nanos
    ) -> EpochMetrics:
        """The figures at `at`, as rank 0 is told them; `devices` are by rank.

        `loss` and `picks` are the epoch's, as it closed or as it stands.
        """
        shares = [self._shares.get(Rank(one)) or _Share() for one in range(len(devices))]
        batches = sum(share.batches for share in shares)
        return EpochMetrics(
            rank=Rank(0),
            epoch=epoch,
            loss=loss,
            picks=picks,
            epoch_ms=0.0 if self._began is None else (at - self._began) / NS_PER_MS,
            scalars=_weighted(shares),
            rank_scalars=tuple(share.scalars() for share in shares),
            rank_loss=tuple(share.loss for share in shares),
            rank_picks=tuple(share.picks for share in shares),
            rank_batches=tuple(share.batches for share in shares),
            rank_share=tuple(share.batches / batches if batches else 0.0 for share in shares),
            rank_throughput=tuple(
                share.picks / share.work_ms if share.work_ms else 0.0 for share in shares
            ),
            rank_work_ms=tuple(share.work_ms for share in shares),
            rank_compute_ms=tuple(share.busy_ns / NS_PER_MS for share in shares),
            rank_starve_ms=tuple(share.data_ns / NS_PER_MS for share in shares),
            devices=tuple(devices),
        )


def _weighted(shares: Sequence[_Share]) -> dict[str, float]:
    """Each name's mean over the ranks that noted it, by their batches; evenly if none has any."""
    noted = [(share.batches, share.scalars()) for share in shares]
    means = {}
    for name in sorted({name for _, by_name in noted for name in by_name}):
        told = [(batches, by_name[name]) for batches, by_name in noted if name in by_name]
        if not any(batches for batches, _ in told):
            told = [(1, mean) for _, mean in told]
        weight = sum(batches for batches, _ in told)
        means[name] = sum(batches * mean for batches, mean in told) / weight
    return means
