"""Which of many failure reports is the cause.

When one rank fails, others often fail because of it: their reports come later, or name a lost
peer. The first report by the shared monotonic clock that is no consequence wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.ids import Nanos, Rank

CONSEQUENCES = ("PeersLost", "PeerBroke", "KeyboardInterrupt")


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One rank's failure, as its error file tells it."""

    rank: Rank
    type: str  # with its module, unless that is builtins
    message: str
    at: Nanos


def root_cause(reports: Iterable[FailureReport]) -> FailureReport | None:
    """The first report that is not a consequence of another; None without reports."""
    ordered = sorted(reports, key=lambda r: (_is_consequence(r), r.at, r.rank))
    return ordered[0] if ordered else None


def _is_consequence(report: FailureReport) -> bool:
    return report.type.rpartition(".")[2] in CONSEQUENCES
