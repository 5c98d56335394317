"""Splits the last batches of an epoch so that the slowest rank ends as early as can be.

The last window is exact: nobody may run on, so the split alone decides who waits. It knows
costs and counts, nothing of picks or rounds.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def split_remainder(
    batches: int,
    costs: Mapping[Rank, float | None],
    living: Collection[Rank] | None = None,
) -> dict[Rank, int]:
    """Batches per rank, summing to `batches` (if anyone lives) with the least makespan.

    `costs` is time per batch in any unit. A living rank without a known cost counts as the slowest
    known one; with none known all count the same. `living` is by default everybody in `costs`; a
    rank of `costs` that is not in it gets 0. Ties go to the lower rank.
    """
    living = costs if living is None else living
    known = {r: c for r in living if (c := costs.get(r)) is not None and 0 < c < math.inf}
    slowest = max(known.values(), default=1.0)
    price = {rank: known.get(rank, slowest) for rank in sorted(living)}
    batches_of = dict.fromkeys(sorted({*costs, *living}), 0)
    if price and batches > 0:
        batches_of.update(_fill(batches, price))
        _pair_lone_batches(batches_of, price)
    return batches_of


def _fill(batches: int, price: Mapping[Rank, float]) -> dict[Rank, int]:
    """Give each batch to the rank that would finish it first.

    The finish times so used are the `batches` smallest of all multiples of the prices, hence no
    split ends earlier. All multiples up to the fluid optimum are among them, which skips
    the long part of the loop; a hair less guards against rounding up.
    """
    fluid = batches / sum(1 / cost for cost in price.values()) * (1 - 1e-9)
    batches_of = {rank: int(fluid / cost) for rank, cost in price.items()}
    heap = [((batches_of[rank] + 1) * cost, rank) for rank, cost in price.items()]
    heapq.heapify(heap)
    for _ in range(batches - sum(batches_of.values())):
        _, rank = heap[0]
        batches_of[rank] += 1
        heapq.heapreplace(heap, ((batches_of[rank] + 1) * price[rank], rank))
    return batches_of


def _pair_lone_batches(batches_of: dict[Rank, int], price: Mapping[Rank, float]) -> None:
    """Give single batches company, as long as the makespan stays.

    A one-batch window has no second batch to time, and one such rank makes the balancer fall back
    to compute times for everybody. That is worth a free move; it is not worth a longer window,
    since the balancer's memory takes one coarse reading in its stride. As the filling is exact,
    only ties are free.
    """
    makespan = max(batches_of[rank] * cost for rank, cost in price.items())
    for rank in price:
        if batches_of[rank] != 1:
            continue
        donors = [(batches_of[r] * price[r], -r) for r in price if batches_of[r] > 2]
        if donors and 2 * price[rank] <= makespan:
            batches_of[Rank(-max(donors)[1])] -= 1
            batches_of[rank] = 2
            continue
        takers = [((batches_of[r] + 1) * price[r], r) for r in price if r != rank and batches_of[r]]
        if takers and min(takers)[0] <= makespan:
            batches_of[min(takers)[1]] += 1
            batches_of[rank] = 0
