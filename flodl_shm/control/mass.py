"""The weight of a rank in the parameter mean: ranks and coordinator compute it alike."""

from __future__ import annotations

REFUSED = -1.0  # in place of a mass: the replica is not finite and enters nothing; idle is 0


def mass(steps: int, gamma: float) -> float:
    """A rank's weight in the parameter mean: steps**gamma, and 0 for a rank that did not move.

    The guard matters for every gamma: 0**0 is 1 and 0**-1 has no value (floDl, realized work).
    """
    return float(steps) ** gamma if steps > 0 else 0.0
