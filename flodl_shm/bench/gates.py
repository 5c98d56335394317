"""Bounds on figures of a full run, told beside them.

A verdict is words: the machines that benchmarks run on are shared, so a missed bound is a reason
to look at the load and measure again, not a failure of the program. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gate:
    """A figure's bound, in the rows it holds for."""

    key: str
    bound: float
    of: Callable[[Row], bool]
    at_least: bool = True  # else at most

    def holds(self, value: float) -> bool:
        """Whether a figure keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


def verdicts(gates: Sequence[Gate], rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """A line for each gate and row that has the figure; `names` are the keys that name a row.

    A figure that is None there is none of.
    """
    return [
        f"{' '.join(str(row[name]) for name in names if name in row)}: {gate.key} "
        f"{row[gate.key]:.3g}, {'at least' if gate.at_least else 'at most'} {gate.bound:g}: "
        f"{'held' if gate.holds(row[gate.key]) else 'MISSED'}"
        for gate in gates
        for row in rows
        if row.get(gate.key) is not None and gate.of(row)
    ]
