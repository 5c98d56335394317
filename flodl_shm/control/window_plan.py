"""How many batches each rank gets in the next window.

Most windows are elastic: `planned` is a belief, `ceiling` the most a rank may do, and at every
batch boundary the rank itself decides whether another batch still fits before the anchor rank's
end. The last window of an epoch is exact: it takes all that is left, so that the epoch ends in
one reduce and nobody trains a pick twice. Counts are in batches; a batch has each rank's own size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flodl_shm.control.last_window import split_remainder
from flodl_shm.ids import Rank

# A remainder of up to this many windows is planned as one. Below 1 the epoch would end in crumbs,
# whose rounding to whole batches costs most; far above, the exact window's want of elasticity does.
FINAL_WINDOWS = 1.5
# A rank may do twice what is believed (and two more): a rank 30 % slower than believed stretches
# the window by as much, one that is throttled in mid-run by a factor of two.
HEADROOM = 2
UNCALIBRATED_HEADROOM = 64  # nothing is known yet; floDl's clamp on speed ratios

Counts = Mapping[Rank, int]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Batches per rank for one window."""

    planned: dict[Rank, int]
    ceiling: dict[Rank, int]
    exact: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of the living ranks before a window."""

    counts: Counts  # batches of a plain window
    costs: Mapping[Rank, float | None]  # per batch
    sizes: Counts  # picks of a batch
    calibrated: bool
    elastic: bool
    most_ahead: int | None = None  # batches a rank may have more than another

    @property
    def picks(self) -> int:
        """Picks of a plain window."""
        return sum(count * self.sizes[rank] for rank, count in self.counts.items())


def plan_window(left: int, belief: Belief) -> WindowPlan:
    """Plan one window when `left` picks of the epoch are in nobody's hands."""
    counts = belief.counts if belief.calibrated else _first_counts(left, belief)
    total = sum(count * belief.sizes[rank] for rank, count in counts.items())
    crumbs = sum(belief.sizes[rank] for rank in counts)
    if left <= FINAL_WINDOWS * total or left < total + crumbs:
        split = split_picks(left, belief)
        return WindowPlan(split, dict(split), True, f"last {left} picks of the epoch")
    if not belief.elastic:
        return WindowPlan(dict(counts), dict(counts), True, f"counted, {left} picks left")
    ceiling = {}
    for rank, count in counts.items():
        most = HEADROOM * count + 2 if belief.calibrated else UNCALIBRATED_HEADROOM * count
        ceiling[rank] = min(most, count + (left - total) * count // total)
    return WindowPlan(dict(counts), ceiling, False, f"{left} picks left in the epoch")


def plan_ahead(counts: Counts) -> WindowPlan:
    """Plan a window on top of one under way: elastic, the epoch's end is far."""
    ceiling = {rank: HEADROOM * count + 2 for rank, count in counts.items()}
    return WindowPlan(dict(counts), ceiling, False, "dealt ahead")


def plan_sync(left: int, sizes: Counts) -> WindowPlan:
    """One batch for each rank, in roster order, as long as the epoch has any picks."""
    planned = {}
    for rank, size in sizes.items():
        planned[rank] = int(left > 0)
        left -= size
    return WindowPlan(planned, dict(planned), True, "one batch for each rank")


def split_picks(left: int, belief: Belief) -> dict[Rank, int]:
    """Batches that take all of `left` picks with the least makespan; one of them may be short.

    With equal sizes that is exact. With unequal ones, or a bound on who may be ahead, batches are
    dealt one by one to whoever would end it first, which is at most one batch from the best.
    """
    sizes, ahead = belief.sizes, belief.most_ahead
    if len(set(sizes.values())) == 1 and ahead is None:
        size = next(iter(sizes.values()))
        return split_remainder(-(-left // size), belief.costs)
    known = [cost for cost in belief.costs.values() if cost is not None]
    price = {rank: cost or max(known, default=1.0) for rank, cost in belief.costs.items()}
    batches = dict.fromkeys(sizes, 0)
    # Crumbs go to somebody: with fewer batches left than ranks one is ahead by 1, bound or not.
    bound = math.inf if ahead is None else max(ahead, 1)
    while left > 0:
        fit = [rank for rank in batches if batches[rank] < min(batches.values()) + bound]
        rank = min(fit, key=lambda r: ((batches[r] + 1) * price[r], r))
        batches[rank] += 1
        left -= sizes[rank]
    return batches


def _first_counts(left: int, belief: Belief) -> dict[Rank, int]:
    """Before any timing, keep the first window under half of a short epoch.

    Equal counts are a guess; the rest of the epoch should be dealt by measured speed.
    """
    share = max(1, left // (2 * sum(belief.sizes[rank] for rank in belief.counts)))
    return {rank: min(count, share) for rank, count in belief.counts.items()}
