"""How much each rank does: measured by ElChe, or told by fixed ratios.

One face for the reduce cycle. Counts are in batches of each rank's own size, costs in any unit of
time per batch. What a window is, and when one is issued, is not known here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.el_che import ElChe, ElCheConfig, ElCheState, Reading

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flodl_shm.control.convergence import Verdict
    from flodl_shm.control.messages import Arrived
    from flodl_shm.control.options import Settled
    from flodl_shm.ids import Rank


class Balance:
    """The balance of one run that follows `settled`."""

    def __init__(self, settled: Settled, *, one_batch: bool = False) -> None:
        """`one_batch`: windows are one batch for each rank, and stay so."""
        self._plan = settled
        # Fixed shares, and a bound on who may be ahead by how much, need counted windows.
        self.elastic = not settled.partition_ratios and settled.max_batch_diff is None
        self._el_che = ElChe(
            ElCheConfig(
                world_size=settled.world_size,
                anchor=1 if one_batch else settled.anchor,
                max_anchor=settled.max_anchor,
                overhead_target=settled.overhead_target,
                max_batch_diff=settled.max_batch_diff,
                speed_hint=settled.speed_hint,
                grows=not one_batch,
            )
        )
        mean_size = sum(settled.batch_sizes) / settled.world_size
        self._el_che.cap(max(1, int(settled.epoch_picks / mean_size)))

    @property
    def calibrated(self) -> bool:
        """Whether counts stand on more than a guess."""
        return bool(self._plan.partition_ratios) or self._el_che.calibrated

    @property
    def anchor_rank(self) -> Rank | None:
        """The rank that sets the pace; None while nobody does."""
        return self._el_che.anchor_rank

    def costs(self, living: Collection[Rank]) -> dict[Rank, float | None]:
        """Cost per batch of each living rank; None while unknown."""
        ratios = self._plan.partition_ratios
        if ratios:
            return {rank: self._plan.batch_sizes[rank] / ratios[rank] for rank in living}
        return {rank: self._el_che.cost_ns(rank) for rank in living}

    def counts(self, living: Collection[Rank]) -> dict[Rank, int]:
        """Batches of each living rank in a plain window; at least 1 each."""
        if not self._plan.partition_ratios:
            return self._el_che.counts(living)
        costs = {rank: cost for rank, cost in self.costs(living).items() if cost is not None}
        slowest = max(costs.values())
        steps = self._el_che.anchor_steps
        return {rank: max(1, round(steps * slowest / cost)) for rank, cost in costs.items()}

    def fastest(self, living: Collection[Rank]) -> Rank:
        """The rank whose batches cost least; the lowest while that is unknown."""
        costs = self.costs(living)
        return min(living, key=lambda rank: (costs[rank] or 0, rank))

    def report(
        self, arrivals: Mapping[Rank, Arrived], *, sync_ns: int, living: Collection[Rank]
    ) -> str:
        """Feed one settled window. Returns the reason; empty if there was nothing to learn."""
        readings = {
            rank: _reading(report)
            for rank, report in arrivals.items()
            if rank in living and report.rest_ns + report.first_ns
        }
        return self._el_che.report(readings, sync_ns=sync_ns, living=living) if readings else ""

    def judge(self, verdict: Verdict) -> str:
        """Take the guard's word on the newest reduce."""
        return self._el_che.judge(verdict)

    def drop(self, rank: Rank) -> None:
        """The rank is dead."""
        self._el_che.drop(rank)

    def recall(self, rank: Rank, cost_ns: float | None) -> None:
        """The rank is back; its batches may have had a cost before."""
        if cost_ns and not self._plan.partition_ratios:
            self._el_che.recall(rank, cost_ns)

    def to_state(self) -> dict[str, object]:
        """What was learned, in plain values: what a checkpoint keeps."""
        return dict(msgspec.to_builtins(self._el_che.to_state()))

    def restore(self, state: dict[str, object], *, keeps_length: bool) -> None:
        """Go on from what `to_state` gave in a run of as many ranks.

        `keeps_length`: windows go on as long as they were; else only speeds count, since under
        another policy windows had another length for another reason. Raises BadConfig on a state
        of another world size, msgspec.ValidationError on one that is none.
        """
        learned = msgspec.convert(state, ElCheState)
        if not keeps_length:
            learned = replace(learned, anchor_steps=self._el_che.anchor_steps)
        self._el_che.restore(learned)


def _reading(report: Arrived) -> Reading:
    return Reading(
        steps=report.steps,
        batches=report.batches,
        busy_ns=report.busy_ns,
        first_ns=report.first_ns,
        rest_ns=report.rest_ns,
        callback_ns=report.callback_ns,
    )
