"""When too many ranks are missing: the user's own limit to what a run is worth going on with.

Not known here: how a run ends, and what is saved of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.ledger import FloorVerdict
from flodl_shm.ids import Nanos

if TYPE_CHECKING:
    from collections.abc import Collection

    from flodl_shm.control.ledger import Ledger
    from flodl_shm.control.options import Survival
    from flodl_shm.ids import Rank


@dataclass(frozen=True, slots=True)
class Breach:
    """Why the run ends, with who is missing, and when it is over whatever is saved by then."""

    reason: str
    until: Nanos


def breach_of(
    ledger: Ledger, survival: Survival, returning: Collection[Rank], now: Nanos
) -> Breach | None:
    """Look at the ledger after a death; `returning` ranks are not missing. None: go on."""
    until = Nanos(now + int(survival.grace_s * 1e9))
    if survival.on_death == "abort":
        return Breach(f"{ledger.obituary()} lost, and --on-death is abort", until)
    verdict, said = ledger.verdict(returning=returning)
    if verdict is FloorVerdict.GO_ON or not ledger.living:
        return None
    return Breach(f"{said}: {ledger.obituary()}", until)
