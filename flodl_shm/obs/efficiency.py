"""How much of what the ranks could have done entered the consensus, and where the rest went.

Ideal: every rank trains at its own rate (picks per busy second) for as long as it lives. Each
nanosecond of a living rank is busy, or a wait with a name; each busy one made picks that were
committed or lost. So `he` and the waste add up to 1, but for time nobody measured. Knows no
messages: sums in, fractions out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.ids import Nanos
    from flodl_shm.obs.rank_tally import RankTally

WASTE = ("barrier", "dispatch", "reduce", "data", "lost")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the ideal; None where there is nothing to divide by.

    he: committed picks over the ideal. vs_fastest: committed rate over the fastest rank alone.
    sync_bound: what ranks that meet after every batch can reach at best.
    """

    he: float | None = None
    vs_fastest: float | None = None
    sync_bound: float | None = None
    waste: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WASTE, 0.0))


def measure(
    ranks: Iterable[RankTally], *, start: Nanos, stop: Nanos, outside_ns: int = 0
) -> Efficiency:
    """Over [start, stop) less `outside_ns` of evaluations and callbacks."""
    moving = [rank for rank in ranks if rank.rate > 0]
    train_ns = stop - start - outside_ns
    lived = [max(0, rank.lived_ns(start, stop) - outside_ns) for rank in moving]
    ideal = sum(rank.rate * ns for rank, ns in zip(moving, lived, strict=True)) / 1e9
    if train_ns <= 0 or ideal <= 0:
        return Efficiency()
    committed = sum(rank.committed for rank in moving)
    rates = [rank.rate for rank in moving]
    gone = sum(max(0, rank.reported - rank.committed - rank.in_flight) for rank in moving)
    lost = gone + sum(rank.rate * rank.lost_ns for rank in moving) / 1e9
    return Efficiency(
        he=committed / ideal,
        vs_fastest=committed / (train_ns / 1e9) / max(rates),
        sync_bound=len(rates) * min(rates) / sum(rates),
        waste={
            "barrier": sum(r.rate * r.barrier_ns for r in moving) / 1e9 / ideal,
            "dispatch": sum(r.rate * r.wait_ns for r in moving) / 1e9 / ideal,
            "reduce": sum(r.rate * r.reduce_ns for r in moving) / 1e9 / ideal,
            "data": sum(r.rate * r.data_ns for r in moving) / 1e9 / ideal,
            "lost": lost / ideal,
        },
    )
