"""How long a window is, in steps of the anchor rank, and when it may get longer.

A window has a fixed cost: its reduce, and what the anchor rank's first batch takes longer than its
others. When that is more than a given part of the window, a longer one is proposed; the guard's
verdict on the same reduce commits or drops it. Only a guard makes windows shorter. Ranks, counts
and the cost of a batch are the balancer's.
"""

from __future__ import annotations

import math

from flodl_shm.control.convergence import NudgeDown, Stable, Verdict

REARM = 5  # stable verdicts in a row that allow growth again
MAX_GROWTH = 2.0  # per window: one reading must not multiply the window
NUDGE_FLOOR = 0.1  # a guard gone wild must not collapse the window in one step


class WindowGrowth:
    """anchor_steps, and what was proposed for them. Bounds are in steps, target a part."""

    def __init__(self, steps: int, *, low: int, high: int, target: float) -> None:
        self.low = min(low, high)
        self.high = high
        self.target = target
        self.steps = min(max(steps, self.low), high)
        self._proposal: int | None = None
        self._may_grow = True
        self._stable_run = 0

    def propose(self, *, cost_ns: float, fixed_ns: float, settled: bool, cap: int | None) -> str:
        """Weigh fixed cost against the window; `cap` is a total that already binds, else None.

        Returns the words for it. Early on (not `settled`) costs still fall, so only a clear excess
        counts; to wait until they stand would cost more than it saves.
        """
        self._proposal = None
        overhead = fixed_ns / (self.steps * cost_ns + fixed_ns)
        limit = self.target if settled else 2 * self.target
        said = f"overhead {overhead:.1%} of the window"
        if overhead <= limit:
            return said
        scale = min(overhead / self.target, MAX_GROWTH)
        wanted = min(max(math.ceil(self.steps * scale), self.low), self.high)
        if wanted <= self.steps:
            return f"{said}, but {self.high} anchor steps are the most"
        if not self._may_grow:
            return f"{said}, but growth is off"
        if cap is not None:
            return f"{said}, but a window is capped at {cap} batches"
        self._proposal = wanted
        return f"{said}, over {limit:.1%}: {wanted} anchor steps proposed"

    def forget_proposal(self) -> None:
        """This window gives no ground to grow; an older one's is out of date."""
        self._proposal = None

    def judge(self, verdict: Verdict) -> str:
        """Commit the proposal, drop it, or go down; in words."""
        proposal, self._proposal = self._proposal, None
        if isinstance(verdict, Stable):
            return self._commit(proposal)
        # The proposal is dropped first: made before a nudge, it would later undo it.
        self._may_grow, self._stable_run = False, 0
        before = self.steps
        if isinstance(verdict, NudgeDown) and math.isfinite(verdict.factor):
            # Below the user's least steps too: he asked for speed, the guard saves the model.
            factor = min(max(verdict.factor, NUDGE_FLOOR), 1.0)
            self.steps = max(1, math.ceil(before * factor))
            return f"window nudged from {before} to {self.steps} anchor steps, growth off"
        dropped = f"growth to {proposal} dropped, " if proposal else ""
        return f"{dropped}growth off, window stays at {before} anchor steps"

    def _commit(self, proposal: int | None) -> str:
        self._stable_run += 1
        if self._stable_run >= REARM:
            self._may_grow = True
        if proposal is None:
            return f"window stays at {self.steps} anchor steps"
        before, self.steps = self.steps, proposal
        return f"window grows from {before} to {proposal} anchor steps"
