"""Guards against replicas drifting apart: from each reduce's divergence to a verdict on growth.

Divergence is the largest distance of a contributor from the mean, over the norm of the mean. A
guard may let windows grow, stop their growth, or ask for shorter ones; it does not know how long
they are or who decides that. Guards keep their state over epochs: an epoch's end is no event for
the weights.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Stable:
    """Windows may grow."""


@dataclass(frozen=True, slots=True)
class SuppressGrowth:
    """Windows must not grow for now."""


@dataclass(frozen=True, slots=True)
class NudgeDown:
    """Windows shall be shorter: times `factor`, between 0 and 1."""

    factor: float


Verdict = Stable | SuppressGrowth | NudgeDown


class Guard(Protocol):
    """What judges one reduce after the other."""

    def report(self, divergence: float, *, k_used: int, k_max: int) -> tuple[Verdict, str]:
        """Judge a reduce: steps of the window over all ranks, and of the busiest rank."""


class NoGuard:
    """Always content: the baseline to measure guards against."""

    def report(self, divergence: float, *, k_used: int, k_max: int) -> tuple[Verdict, str]:
        """See Guard."""
        return Stable(), f"divergence {divergence:.3g}, no guard"


class TrendGuard:
    """Stops growth while divergence rises three times running and is above a threshold.

    It never asks for shorter windows: three readings are too noisy a reason to undo anything.
    """

    KEPT = 5
    RISING = 3

    def __init__(self, *, threshold: float = 0.05) -> None:
        """0.05 fits means that overwrite; elastic blending keeps a spread of 0.1: give 0.3."""
        self.threshold = threshold
        self._recent: deque[float] = deque(maxlen=self.KEPT)

    def report(self, divergence: float, *, k_used: int, k_max: int) -> tuple[Verdict, str]:
        """See Guard. What is not finite stops growth and is not remembered."""
        if not math.isfinite(divergence):
            return SuppressGrowth(), f"divergence is {divergence} after {k_used} steps"
        self._recent.append(divergence)
        last = list(self._recent)[-self.RISING :]
        trail = " < ".join(f"{d:.3g}" for d in last)
        rising = len(last) == self.RISING and all(a < b for a, b in itertools.pairwise(last))
        if rising and divergence > self.threshold:
            return SuppressGrowth(), f"divergence rises: {trail}, above {self.threshold:g}"
        if rising:
            return Stable(), f"divergence rises: {trail}, but is within {self.threshold:g}"
        return Stable(), f"divergence {divergence:.3g} after {k_used} steps, not rising steadily"

    def to_state(self) -> tuple[float, ...]:
        """What a checkpoint keeps: the recent divergences, oldest first."""
        return tuple(self._recent)

    def restore(self, state: Sequence[float]) -> None:
        """Go on from what `to_state` gave."""
        self._recent = deque(state, maxlen=self.KEPT)


class MsfGuard:
    """Watches how fast divergence grows per step: an estimate of the largest Lyapunov exponent.

    Smoothed over reduces; above one threshold for three reduces growth stops, above a tenfold one
    windows are halved. Both streaks count on their own, the sterner verdict wins, and a verdict
    given restarts only its own streak.
    """

    FLOOR = 1e-8  # below it divergence is rounding noise and its logarithm says nothing
    MEMORY = 0.9
    SUPPRESS_ABOVE = 1e-3  # per step
    NUDGE_ABOVE = 1e-2
    STREAK = 3
    FACTOR = 0.5

    def __init__(self) -> None:
        self._before: float | None = None
        self._mean = 0.0  # starts at 0, corrected for that by 1 - MEMORY**readings
        self._readings = 0
        self._fast = 0  # reduces in a row above SUPPRESS_ABOVE
        self._wild = 0  # ... above NUDGE_ABOVE

    def report(self, divergence: float, *, k_used: int, k_max: int) -> tuple[Verdict, str]:
        """See Guard."""
        if not math.isfinite(divergence):
            self._before = None
            return SuppressGrowth(), f"divergence is {divergence} after {k_used} steps"
        before, self._before = self._before, divergence if divergence > self.FLOOR else None
        if before is None or self._before is None or k_max <= 0:
            return Stable(), f"divergence {divergence:.3g}, no rate yet"
        rate = self._smooth(math.log(divergence / before) / k_max)
        self._fast = self._fast + 1 if rate > self.SUPPRESS_ABOVE else 0
        self._wild = self._wild + 1 if rate > self.NUDGE_ABOVE else 0
        text = f"divergence {divergence:.3g} grows by {rate:.2g} a step"
        if self._wild >= self.STREAK:
            self._wild = 0
            said = f"{text}, over {self.NUDGE_ABOVE:g} for {self.STREAK} reduces"
            return NudgeDown(self.FACTOR), said
        if self._fast >= self.STREAK:
            self._fast = 0
            said = f"{text}, over {self.SUPPRESS_ABOVE:g} for {self.STREAK} reduces"
            return SuppressGrowth(), said
        return Stable(), text

    def _smooth(self, rate: float) -> float:
        self._mean = self.MEMORY * self._mean + (1 - self.MEMORY) * rate
        self._readings += 1
        return self._mean / (1 - self.MEMORY**self._readings)


def make_guard(name: str) -> Guard:
    """The guard of that name: trend, msf or none. Raises BadConfig on another."""
    if name == "trend":
        return TrendGuard()
    if name == "msf":
        return MsfGuard()
    if name == "none":
        return NoGuard()
    raise BadConfig(f"no guard is called {name!r}", hint="Choose trend, msf or none.")
