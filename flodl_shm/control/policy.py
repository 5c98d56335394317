"""What a policy is: when a round may be issued, and who gets which picks for it.

    sync      one batch for each rank a round, dealt in order, never by timing
    cadence   elastic windows as long as the balancer says, dealt anew for each or on top of one

One object per policy; the gates are in gate.py, the counts in window_plan.py. Rounds, rosters and
what ranks report are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flodl_shm.control import gate, window_plan
from flodl_shm.control.gate import Gate
from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.control.chunk_pool import ChunkPool
    from flodl_shm.control.window_ledger import Window
    from flodl_shm.control.window_plan import Belief, WindowPlan
    from flodl_shm.ids import Rank


@dataclass(frozen=True, slots=True)
class Scene:
    """What a policy looks at, and the pool it deals from."""

    pool: ChunkPool
    belief: Belief
    flying: list[Window]  # rounds issued whose contributors are not certain, oldest first
    epochs_left: bool

    def needs_ahead(self) -> Mapping[Rank, int]:
        """Picks each rank must be given on top of what it may still hold in the worst case, to
        issue a round on top of the one that flies."""
        (flying,) = self.flying
        needs = {}
        for rank, most in window_plan.plan_ahead(self.belief.counts).ceiling.items():
            batches = flying.ceiling.get(rank, 0) + most
            needs[rank] = max(0, batches * self.belief.sizes[rank] - self.pool.held(rank))
        return needs

    def view(self) -> gate.View:
        """The same in the words of the gates."""
        ahead = self.needs_ahead() if len(self.flying) == 1 else {}
        return gate.View(
            unsettled=len(self.flying),
            newest_exact=bool(self.flying) and self.flying[-1].exact,
            undealt=self.pool.undealt,
            unused=sum(self.pool.held(rank) for rank in self.belief.counts),
            early_need=sum(ahead.values()),
            window=self.belief.picks,
            calibrated=self.belief.calibrated,
            epochs_left=self.epochs_left,
        )


class Policy(Protocol):
    """One way to train together."""

    one_batch: bool  # a window is one batch for each rank, and never grows

    def gate(self, scene: Scene) -> tuple[Gate, str]:
        """What may be done now, and why."""

    def deal(self, verdict: Gate, scene: Scene) -> WindowPlan:
        """Take picks from the pool for the round the gate lets through."""


class Sync:
    """Every rank steps once a round."""

    one_batch = True

    def gate(self, scene: Scene) -> tuple[Gate, str]:
        """See Policy."""
        return gate.sync(scene.view())

    def deal(self, verdict: Gate, scene: Scene) -> WindowPlan:
        """See Policy."""
        if not scene.pool.undealt:  # a script left its window early: its picks are dealt anew
            for rank in scene.belief.counts:
                scene.pool.give_back(rank)
        sizes = {rank: scene.belief.sizes[rank] for rank in scene.belief.counts}
        planned = window_plan.plan_sync(scene.pool.undealt, sizes)
        for rank, batches in planned.planned.items():
            if batches:
                scene.pool.take_next(rank, sizes[rank])
        return planned


class Cadence:
    """Ranks meet when the slowest one has done its steps."""

    one_batch = False

    def gate(self, scene: Scene) -> tuple[Gate, str]:
        """See Policy."""
        return gate.cadence(scene.view())

    def deal(self, verdict: Gate, scene: Scene) -> WindowPlan:
        """See Policy."""
        return self._ahead(scene) if verdict is Gate.EARLY else self._anew(scene)

    def _ahead(self, scene: Scene) -> WindowPlan:
        belief = scene.belief
        for rank, picks in scene.needs_ahead().items():
            if picks:
                scene.pool.take(rank, picks, unit=belief.sizes[rank])
        return window_plan.plan_ahead(belief.counts)

    def _anew(self, scene: Scene) -> WindowPlan:
        """Nothing is in flight: take back what was not used and deal anew."""
        belief, pool = scene.belief, scene.pool
        for rank in belief.counts:
            pool.give_back(rank)
        planned = window_plan.plan_window(pool.undealt, belief)
        for rank, batches in planned.ceiling.items():
            if batches:
                size = belief.sizes[rank]
                pool.take(rank, batches * size, unit=size)
        return planned


def policy_of(name: str) -> Policy:
    """The policy of that name."""
    if name == "sync":
        return Sync()
    if name == "cadence":
        return Cadence()
    raise WeBroke(f"no policy is called {name!r}, yet a plan was made for it")
