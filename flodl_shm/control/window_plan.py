"""How many batches each rank gets in the next window.

Most windows are elastic: `planned` is a belief, `ceiling` the most a rank may do, and at every
batch boundary the rank itself decides whether another batch still fits before the anchor rank's
end. The last window of an epoch is exact: its counts sum to what is left, so that the epoch ends
in one reduce and nobody trains a pick twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.last_window import split_remainder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flodl_shm.ids import Rank

# A remainder of up to this many windows is planned as one. Below 1 the epoch would end in crumbs,
# whose rounding to whole batches costs most; far above, the exact window's want of elasticity does.
FINAL_WINDOWS = 1.5
# A rank may do twice what is believed (and two more): a rank 30 % slower than believed stretches
# the window by as much, one that is throttled in mid-run by a factor of two.
HEADROOM = 2
UNCALIBRATED_HEADROOM = 64  # nothing is known yet; floDl's clamp on speed ratios


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Batches per rank for one window."""

    planned: dict[Rank, int]
    ceiling: dict[Rank, int]
    exact: bool
    reason: str


def plan_window(
    left: int,
    counts: Mapping[Rank, int],
    costs: Mapping[Rank, float | None],
    *,
    calibrated: bool,
) -> WindowPlan:
    """Plan one window when `left` batches of the epoch are in nobody's hands.

    `counts` is the balancer's word in batches per living rank, `costs` its cost per batch.
    """
    if not calibrated:
        counts = _first_counts(left, counts)
    total = sum(counts.values())
    if left <= FINAL_WINDOWS * total or left < total + len(counts):
        split = split_remainder(left, costs)
        return WindowPlan(split, dict(split), True, f"last {left} batches of the epoch")
    ceiling = _ceilings(left - total, counts, calibrated=calibrated)
    return WindowPlan(dict(counts), ceiling, False, f"{left} batches left in the epoch")


def _first_counts(left: int, counts: Mapping[Rank, int]) -> dict[Rank, int]:
    """Before any timing, keep the first window under half of a short epoch.

    Equal counts are a guess; the rest of the epoch should be dealt by measured speed.
    """
    share = max(1, left // (2 * len(counts)))
    return {rank: min(count, share) for rank, count in counts.items()}


def _ceilings(spare: int, counts: Mapping[Rank, int], *, calibrated: bool) -> dict[Rank, int]:
    total = sum(counts.values())
    ceiling = {}
    for rank, count in counts.items():
        most = HEADROOM * count + 2 if calibrated else UNCALIBRATED_HEADROOM * count
        ceiling[rank] = min(most, count + spare * count // total)
    return ceiling


def plan_ahead(counts: Mapping[Rank, int]) -> WindowPlan:
    """Plan a window on top of one under way: elastic, the epoch's end is far."""
    ceiling = {rank: HEADROOM * count + 2 for rank, count in counts.items()}
    return WindowPlan(dict(counts), ceiling, False, "dealt ahead")


def plan_sync(left: int, ranks: Sequence[Rank]) -> WindowPlan:
    """One batch for each rank, in roster order, as long as the epoch has any."""
    planned = {rank: int(place < left) for place, rank in enumerate(ranks)}
    return WindowPlan(planned, dict(planned), True, "one batch for each rank")
