"""A balancer and ranks of known cost, to feed it whole windows."""

from __future__ import annotations

from flodl_shm.control.convergence import Stable
from flodl_shm.control.el_che import ElChe, ElCheConfig, Reading

MS = 1_000_000
RIG = (20 * MS, 40 * MS, 80 * MS)


def balancer(world_size=3, anchor=10, **settings):
    return ElChe(ElCheConfig(world_size, anchor, **settings))


def reading(batches, cost, *, first=None, busy=None):
    busy = batches * cost if busy is None else busy
    return Reading(batches, busy, cost if first is None else first, (batches - 1) * cost, batches)


def run(el_che, costs, windows=1, *, sync_ns=0, verdict=None):
    """Whole windows at the planned counts; returns the last reason."""
    living = [rank for rank, cost in enumerate(costs) if cost]
    for _ in range(windows):
        counts = el_che.counts(living)
        readings = {rank: reading(counts[rank], costs[rank]) for rank in living}
        reason = el_che.report(readings, sync_ns=sync_ns, living=living)
        el_che.judge(verdict or Stable())
    return reason
