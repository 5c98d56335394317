"""ElChe, the balancer: measured costs in; anchor rank and batches per rank for a window out.

The slowest rank (the anchor rank) does `anchor_steps` batches in a window; every other rank does as
many as fit in the same time. Costs are per batch *delivered*, data included, so a slow link or a
starved loader counts as slowness. Windows grow while their fixed cost is too large a part of them
and the convergence guard agrees (window_growth.py); single outliers move nothing (smoothed.py).

    probe    nothing is measured      all do anchor_steps, or what a speed hint says
    warmup   1 to 4 windows           the anchor rank stays: first costs fall on the newest device
    stable   from 5 windows on        re-elected; windows may grow at the plain target
    mature   from 20 windows on       the same; learning-rate control trusts it more

Not known here: picks, rounds, the clock, who is dead (the caller says who lives).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from flodl_shm.control.smoothed import Smoothed
from flodl_shm.control.window_growth import WindowGrowth
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flodl_shm.control.convergence import Verdict

COHORT_BAND = 0.15  # ranks within this of the slowest are the slow cohort: any may set the pace
DOMINANCE = 0.10  # an anchor rank in the cohort stays unless another is this much slower
DEAD_ZONE = 0.05  # smaller changes of a count are noise; elastic windows absorb them
MAX_RATIO = 64.0  # a degenerate reading must not schedule 1e5 batches
MISSES = 5  # windows without a reading after which a rank's old ones are forgotten
STABLE_AT, MATURE_AT = 5, 20
LONE_READING = 0.5  # on the word of one window no rank falls below this part of anchor_steps


class Phase(IntEnum):
    """How much the balancer has seen."""

    PROBE = 0
    WARMUP = 1
    STABLE = 2
    MATURE = 3


@dataclass(frozen=True, slots=True)
class ElCheConfig:
    """What a user may set. Raises BadConfig. `overhead_target` is kept within 0.01 .. 0.5."""

    world_size: int
    anchor: int
    max_anchor: int = 1000
    overhead_target: float = 0.05
    max_batch_diff: int | None = None  # batches a rank may be ahead of the least busy one
    min_anchor: int | None = None  # None: the first window's
    speed_hint: tuple[Rank, float] | None = None  # slowest rank; how many times faster others are
    grows: bool = True  # False for sync: its one-step windows are the policy, not a start value

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise BadConfig(f"a world of {self.world_size} ranks cannot be balanced")
        for name in ("anchor", "max_anchor", "min_anchor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(f"{name} is {value}; a window has at least 1 step")
        if not math.isfinite(self.overhead_target):
            raise BadConfig(f"overhead target is {self.overhead_target}, not a number")
        if self.max_batch_diff is not None and self.max_batch_diff < 0:
            raise BadConfig(f"max batch diff is {self.max_batch_diff}, below 0")
        self._check_hint()

    def _check_hint(self) -> None:
        if self.speed_hint is None:
            return
        rank, ratio = self.speed_hint
        if not 0 <= rank < self.world_size:
            raise BadConfig(f"speed hint names rank {rank} of a world of {self.world_size}")
        if not 1 <= ratio < math.inf:
            raise BadConfig(
                f"speed hint {rank}:{ratio:g} would make the other ranks slower",
                hint="Name the slowest rank, and how many times faster the others are.",
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """One rank's window as it was measured, in ns.

    `first_ns` and `rest_ns` contain data waits, `busy_ns` does not. `callback_ns` is user callbacks
    between batches, measured apart: the other figures do not contain it.
    """

    steps: int
    busy_ns: int
    first_ns: int
    rest_ns: int
    batches: int
    callback_ns: int = 0

    @property
    def marginal_ns(self) -> float | None:
        """Cost of a batch after the first, which carries the window's fixed cost; None without."""
        if self.batches < 2 or self.rest_ns <= 0:
            return None
        return self.rest_ns / (self.batches - 1)

    @property
    def compute_ns(self) -> float | None:
        """Busy time per batch, the first included; None if nothing was measured."""
        if self.batches < 1 or self.busy_ns <= 0:
            return None
        return self.busy_ns / self.batches


@dataclass(frozen=True, slots=True)
class ElCheState:
    """What a checkpoint keeps: what was learned, none of the user's settings."""

    anchor_steps: int
    anchor_rank: Rank | None
    costs_ns: tuple[float | None, ...]  # by rank
    windows: int


class ElChe:
    """The balancer of one run."""

    def __init__(self, config: ElCheConfig) -> None:
        self.config = config
        self._growth = WindowGrowth(
            config.anchor,
            low=config.min_anchor or config.anchor,
            high=config.max_anchor,
            target=min(max(config.overhead_target, 0.01), 0.5),
        )
        self._windows = 0  # calibrating reports so far
        self._living = {Rank(r) for r in range(config.world_size)}
        self._elected = config.speed_hint[0] if config.speed_hint else None
        self._costs: dict[Rank, Smoothed] = {}
        self._fills: dict[Rank, Smoothed] = {}
        self._callbacks: dict[Rank, Smoothed] = {}
        self._announced: dict[Rank, int] = {}
        self._misses: dict[Rank, int] = {}
        self._sync = Smoothed()
        self._planned: dict[Rank, int] = {}
        self._total_cap: int | None = None
        self._plan()

    # ---- what can be asked -----------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """How far calibration is."""
        if self._windows >= MATURE_AT:
            return Phase.MATURE
        if self._windows >= STABLE_AT:
            return Phase.STABLE
        return Phase.WARMUP if self._windows else Phase.PROBE

    @property
    def calibrated(self) -> bool:
        """True once a window was measured."""
        return self._windows > 0

    @property
    def anchor_steps(self) -> int:
        """Steps of the anchor rank in a plain window."""
        return self._growth.steps

    @property
    def anchor_rank(self) -> Rank | None:
        """The rank that sets the pace: elected, else hinted, else the lowest living; None: nobody.

        A cap or a callback can leave it fewer than `anchor_steps`: `counts` has the last word.
        """
        if self._elected in self._living:
            return self._elected
        return min(self._living, default=None)

    def cost_ns(self, rank: Rank) -> float | None:
        """The rank's smoothed cost per batch in ns; None while unknown."""
        smoothed = self._costs.get(rank)
        return smoothed.value if smoothed else None

    def counts(self, living: Collection[Rank]) -> dict[Rank, int]:
        """Batches per living rank for the next window; at least 1 each. Changes nothing."""
        wanted = {rank: self._planned.get(rank, self.anchor_steps) for rank in sorted(living)}
        if self.config.max_batch_diff is not None and wanted:
            most = min(wanted.values()) + self.config.max_batch_diff
            wanted = {rank: min(count, most) for rank, count in wanted.items()}
        return self._capped({rank: self._shrunk(rank, count) for rank, count in wanted.items()})

    # ---- what it is told -------------------------------------------------------------------

    def report(
        self, readings: Mapping[Rank, Reading], *, sync_ns: int, living: Collection[Rank]
    ) -> str:
        """Feed one window; `sync_ns` is the newest reduce's time, 0 if none was measured since.

        May propose a longer window, which `judge` then commits or drops. Returns the reason.
        """
        self._living = set(living)
        self._announced.clear()
        moved = {r: reading for r, reading in readings.items() if r in living and reading.batches}
        if not moved:
            return "no rank moved in this window: nothing to learn"
        scale = self._feed(moved)
        if sync_ns > 0:
            self._sync.add(sync_ns)
        self._windows += 1
        elected = self._elect()
        anchor_rank = self.anchor_rank
        slow = self.cost_ns(anchor_rank) if anchor_rank is not None else None
        if anchor_rank is None or slow is None:
            self._windows -= 1  # without the anchor rank's cost no other means anything
            return f"anchor rank {anchor_rank} has no usable time yet: counts stay"
        grown = self._weigh(anchor_rank, slow)
        self._plan()
        return f"{self._words(scale)}{elected}{grown}"

    def judge(self, verdict: Verdict) -> str:
        """Take the guard's word on this reduce: commit the proposal, drop it, or go down."""
        before = self.anchor_steps
        reason = self._growth.judge(verdict)
        if self.anchor_steps != before:
            self._plan()
        return reason

    def cap(self, total_batches: int | None) -> None:
        """No window may have more batches than this, over all ranks: one epoch's."""
        self._total_cap = total_batches

    def drop(self, rank: Rank) -> None:
        """The rank is dead: forget it; a later incarnation starts unknown."""
        for book in (self._costs, self._fills, self._callbacks):
            book.pop(rank, None)
        for counter in (self._announced, self._misses, self._planned):
            counter.pop(rank, None)
        self._living.discard(rank)
        if rank == self._elected:
            # Not held back by the phase: nobody is pinned any more.
            self._elected = None
            self._elect()
            self._plan()

    def recall(self, rank: Rank, cost_ns: float) -> None:
        """The rank is back: until it is measured its batches cost what they did."""
        self._living.add(rank)
        self._costs[rank] = Smoothed(cost_ns)
        self._plan()

    def expect_callback(self, rank: Rank, callback_ns: int) -> None:
        """The rank will run a callback in the next window: it gets that much less to do."""
        self._announced[rank] = max(0, callback_ns)

    # ---- checkpoints -----------------------------------------------------------------------

    def to_state(self) -> ElCheState:
        """What was learned so far."""
        costs = tuple(self.cost_ns(Rank(rank)) for rank in range(self.config.world_size))
        return ElCheState(self.anchor_steps, self._elected, costs, self._windows)

    def restore(self, state: ElCheState) -> None:
        """Go on from a checkpoint. Raises BadConfig if it was of another world size."""
        if len(state.costs_ns) != self.config.world_size:
            raise BadConfig(
                f"the checkpoint balances {len(state.costs_ns)} ranks, "
                f"this run has {self.config.world_size}"
            )
        self._costs = {Rank(r): Smoothed(c) for r, c in enumerate(state.costs_ns) if c}
        self._windows = state.windows if self._costs else 0
        self._elected = state.anchor_rank
        self._growth.steps = min(max(state.anchor_steps, 1), self.config.max_anchor)
        self._planned = {}
        self._plan()

    # ---- inside ----------------------------------------------------------------------------

    def _feed(self, moved: Mapping[Rank, Reading]) -> str:
        """Take the readings on one scale for everybody; says which.

        If a single mover lacks a delivered cost, all are fed compute costs: mixed scales
        turn shares round, since only some would carry their data wait.
        """
        delivered = all(reading.marginal_ns is not None for reading in moved.values())
        for rank in self._living:
            reading = moved.get(rank)
            cost = None
            if reading is not None:
                cost = reading.marginal_ns if delivered else reading.compute_ns
                self._callbacks.setdefault(rank, Smoothed()).add(reading.callback_ns)
            if cost is None:
                self._miss(rank)
                continue
            self._misses[rank] = 0
            # A rank's very first batch on the compute scale is its warm-up: better than nothing,
            # worth nothing beside a second reading.
            self._costs.setdefault(rank, Smoothed()).add(cost, provisional=not delivered)
            if delivered and reading is not None:
                fill = max(0.0, reading.first_ns - cost)
                self._fills.setdefault(rank, Smoothed()).add(fill)
        return "delivered" if delivered else "compute"

    def _miss(self, rank: Rank) -> None:
        self._misses[rank] = self._misses.get(rank, 0) + 1
        if self._misses[rank] >= MISSES:
            self._costs.pop(rank, None)  # back after a long absence it is measured afresh

    def _elect(self) -> str:
        """Choose the anchor rank among the slowest; says so if it changed."""
        known = {r: cost for r in sorted(self._living) if (cost := self.cost_ns(r)) is not None}
        held = self._elected
        silent = held not in self._living or self._misses.get(held, 0) >= MISSES
        if not known or not (silent or self.phase >= Phase.STABLE):
            return ""
        slowest = max(known, key=lambda rank: known[rank])
        cohort = [
            rank for rank, cost in known.items() if cost >= (1 - COHORT_BAND) * known[slowest]
        ]
        if held in cohort and known[slowest] <= (1 + DOMINANCE) * known[held]:
            return ""
        self._elected = slowest if held in cohort else cohort[0]
        return f"; rank {self._elected} is the anchor rank now"

    def _weigh(self, anchor_rank: Rank, slow: float) -> str:
        """Let the window's fixed cost argue for a longer one; not on the first window's word."""
        fill = self._fills.get(anchor_rank)
        if not self.config.grows or fill is None or self._windows < 2:
            self._growth.forget_proposal()
            return ""
        total = sum(self._planned.get(rank, 0) for rank in self._living)
        binds = self._total_cap is not None and total >= self._total_cap
        said = self._growth.propose(
            cost_ns=slow,
            fixed_ns=(self._sync.value or 0.0) + (fill.value or 0.0),
            settled=self.phase >= Phase.STABLE,
            cap=self._total_cap if binds else None,
        )
        return f"; {said}"

    def _plan(self) -> None:
        """Renew the counts, leaving those that would hardly change."""
        for rank in self._living:
            exact = self._exact(rank)
            now = self._planned.get(rank)
            # The anchor rank has no dead zone: its count is what the others are measured by.
            if now is None or rank == self.anchor_rank or abs(exact - now) > DEAD_ZONE * now:
                self._planned[rank] = max(1, round(exact))

    def _exact(self, rank: Rank) -> float:
        """Batches that fit into the anchor rank's steps, not yet rounded."""
        anchor_rank, cost = self.anchor_rank, self.cost_ns(rank)
        slow = self.cost_ns(anchor_rank) if anchor_rank is not None else None
        hint = self.config.speed_hint
        if hint is not None and not self.calibrated and self._elected == hint[0] != rank:
            return self.anchor_steps * min(hint[1], MAX_RATIO)
        if cost is None or slow is None or rank == anchor_rank:
            return float(self.anchor_steps)
        exact = self.anchor_steps * min(slow / cost, MAX_RATIO)
        if self._costs[rank].readings < 2:
            return max(exact, LONE_READING * self.anchor_steps)
        return exact

    def _shrunk(self, rank: Rank, count: int) -> int:
        """Room for callbacks: those announced, or those that come in every window."""
        smoothed, cost = self._callbacks.get(rank), self.cost_ns(rank)
        usual = (smoothed.value or 0.0) if smoothed else 0.0
        slack = self._announced.get(rank, usual)
        return max(1, count - math.ceil(slack / cost)) if slack and cost else count

    def _capped(self, wanted: dict[Rank, int]) -> dict[Rank, int]:
        """Scale the counts into the cap; the rank with most takes what rounding leaves.

        One batch each wins over the cap: who gets none of too few is the caller's business.
        """
        cap, total = self._total_cap, sum(wanted.values())
        if cap is None or total <= cap:
            return wanted
        scaled = {rank: max(1, count * cap // total) for rank, count in wanted.items()}
        most = max(scaled, key=lambda rank: scaled[rank])
        scaled[most] += max(0, cap - sum(scaled.values()))
        for _ in range(sum(scaled.values()) - cap):  # at most one for each rank lifted to 1
            most = max(scaled, key=lambda rank: scaled[rank])
            scaled[most] = max(1, scaled[most] - 1)
        return scaled

    def _words(self, scale: str) -> str:
        known = {rank: self.cost_ns(rank) for rank in sorted(self._living)}
        costs = " ".join(f"{cost / 1e6:.3g}" if cost else "?" for cost in known.values())
        counts = " ".join(str(count) for count in self.counts(self._living).values())
        return (
            f"window {self._windows} ({self.phase.name.lower()}): "
            f"{scale} costs {costs} ms a batch, counts {counts}, "
            f"anchor rank {self.anchor_rank} with {self.anchor_steps} steps"
        )
