"""The dead-rank ledger: which incarnation of which rank lives, who died of what, and the floor.

Several witnesses report one death (a pidfd, a closed socket, a peer); it is counted once, by the
row of the incarnation. A rank that finished its work is neither living nor dead. Who
notices deaths, and what is done about one, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.ids import Rank, Row

if TYPE_CHECKING:
    from collections.abc import Collection

    from flodl_shm.ids import Nanos


class FloorVerdict(Enum):
    """Whether enough ranks are left."""

    GO_ON = "go on"
    BREACHED = "breached"


@dataclass(frozen=True, slots=True)
class Death:
    """One incarnation's end; `incarnation` counts from 0."""

    rank: Rank
    row: Row
    incarnation: int
    cause: str
    at: Nanos


class Ledger:
    """The lives of a run's ranks. Rank r's first incarnation has row r."""

    def __init__(self, world_size: int, *, max_failures: float | None = None) -> None:
        """`max_failures`: ranks that may be missing at once, or a part of the world; None: all but
        one. Raises BadConfig."""
        self.world_size = world_size
        self.limit = _limit(world_size, max_failures)
        self.deaths: list[Death] = []
        self._rows: dict[Rank, list[Row]] = {Rank(r): [Row(r)] for r in range(world_size)}
        self._living: dict[Rank, Row] = {Rank(r): Row(r) for r in range(world_size)}
        self._finished: dict[Rank, Row] = {}

    # ---- lives -----------------------------------------------------------------------------

    def admit(self, rank: Rank, row: Row) -> str:
        """A new incarnation of a dead rank. Raises WeBroke if one lives or the row was used."""
        if rank in self._living or rank in self._finished:
            raise WeBroke(f"rank {rank} cannot come back: row {self.row(rank)} is not dead")
        if any(row in rows for rows in self._rows.values()):
            raise WeBroke(f"row {row} of a new incarnation of rank {rank} was used before")
        self._rows.setdefault(rank, []).append(row)
        self._living[rank] = row
        return f"rank {rank} is back as incarnation {self.incarnation(rank)} in row {row}"

    def bury(self, rank: Rank, row: Row, *, cause: str, at: Nanos) -> tuple[Death | None, str]:
        """Count a death, or say why it is none: known already, or its work was done."""
        if self._finished.get(rank) == row:
            return None, f"rank {rank} ended after its work was done"
        if self._living.get(rank) != row:
            return None, f"row {row} of rank {rank} is no living incarnation: counted before"
        del self._living[rank]
        death = Death(rank, row, self.incarnation(rank), cause, at)
        self.deaths.append(death)
        return death, f"rank {rank} lost: {cause}; {len(self._living)} of {self.world_size} live"

    def finish(self, rank: Rank, row: Row) -> bool:
        """The incarnation has delivered all it owed: its end is no death. False if it is stale."""
        if self._living.get(rank) != row:
            return False
        self._finished[rank] = self._living.pop(rank)
        return True

    # ---- what can be asked -----------------------------------------------------------------

    @property
    def living(self) -> dict[Rank, Row]:
        """Rows of the living ranks, by ascending rank."""
        return dict(sorted(self._living.items()))

    @property
    def lost(self) -> tuple[Rank, ...]:
        """Ranks no incarnation of which lives or has finished."""
        gone = self._rows.keys() - self._living.keys() - self._finished.keys()
        return tuple(sorted(gone))

    def is_living(self, rank: Rank, row: Row) -> bool:
        """Whether this very incarnation lives: what a dead one sends is stale."""
        return self._living.get(rank) == row

    def row(self, rank: Rank) -> Row:
        """The row of the rank's newest incarnation, dead or alive."""
        return self._rows[rank][-1]

    def incarnation(self, rank: Rank) -> int:
        """How often the rank has come back."""
        return len(self._rows[rank]) - 1

    def obituary(self) -> str:
        """Who is lost, and of what: "rank 1 (signal 9), rank 2 (exit 0)"."""
        causes = {death.rank: death.cause for death in self.deaths}
        return ", ".join(f"rank {rank} ({causes[rank]})" for rank in self.lost)

    def verdict(self, *, returning: Collection[Rank] = ()) -> tuple[FloorVerdict, str]:
        """Whether the run may go on; ranks that are being restarted are not missing."""
        lost = len(set(self.lost) - set(returning))
        said = f"{lost} of {self.world_size} ranks are missing"
        if lost > self.limit:
            return FloorVerdict.BREACHED, f"{said}, at most {self.limit} may be"
        return FloorVerdict.GO_ON, f"{said}, up to {self.limit} may be"


def _limit(world_size: int, max_failures: float | None) -> int:
    """Ranks that may be missing; one is always needed."""
    if world_size < 1:
        raise BadConfig(f"a world of {world_size} ranks cannot run")
    if max_failures is None:
        return world_size - 1
    if isinstance(max_failures, int):
        if max_failures < 0:
            raise BadConfig(f"max failures is {max_failures}, below 0")
        return min(max_failures, world_size - 1)
    if not 0 < max_failures <= 1:  # which nan is neither
        raise BadConfig(
            f"max failures is {max_failures:g} of the ranks",
            hint="Give a part above 0 and up to 1, or a whole number of ranks.",
        )
    return min(int(max_failures * world_size), world_size - 1)
