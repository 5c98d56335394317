"""Whether ranks that left a round hold the same: each tells a checksum, all must be one.

A mean that one rank has not received, or that something wrote into, would spread to all others
with the next round, and nobody would ever know. What the sum is taken over is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from flodl_shm.control.messages import Left
    from flodl_shm.ids import Rank, Round

KEPT = 16  # rounds; a rank is at most one behind, as nobody passes a round without it


class Agreement:
    """The checksums of the newest rounds, each as the first rank told it."""

    def __init__(self) -> None:
        self._first: dict[Round, tuple[Rank, int]] = {}

    def left(self, report: Left) -> None:
        """A rank holds a consensus. Raises WeBroke if it is not the others'."""
        number, digest = report.round, report.digest
        if digest is None:
            return
        rank, expected = self._first.setdefault(number, (report.rank, digest))
        if digest != expected:
            raise WeBroke(
                f"after round {number} rank {rank} and rank {report.rank} hold different "
                f"parameters: checksums {expected:08x} and {digest:08x}",
                hint="Something wrote into a replica while the ranks met; if the script did not, "
                "it is our bug.",
            )
        while len(self._first) > KEPT:
            del self._first[next(iter(self._first))]
