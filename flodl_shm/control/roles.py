"""Who calls the user's functions: one holder for each of the roles, and it stays.

    epoch        called before an epoch's first window; nobody, if the job has no such function
    evaluation   scores the consensus; nobody, if the job has no such function
    checkpoint   writes the consensus and calls the checkpoint function; there is always one
    metrics      no role of its own: the lowest living rank, whatever the policy

Policy `fastest`: the rank the caller calls fastest, asked for at the first need, when the holder
is gone, and once more at the first calibration; a rank that falls behind later keeps its roles,
since a callback that wanders shows its file handles and caches on every rank. Policy "3": that
rank. An epoch function or an evaluation is never given to another one than the user named: while
it is dead nobody calls them. A checkpoint matters more than the name of who writes it: it falls
to the lowest living rank. Every rank holds every function, so a role costs nothing to move.

Not known here: what a function did, how long it took, and how fast ranks are. floDl's roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

FASTEST = "fastest"
ROLES = ("epoch", "evaluation", "checkpoint")


class Roles:
    """The holders of one run's roles."""

    def __init__(self, policy: str, has: Collection[str]) -> None:
        """`policy` is "fastest" or a rank's number; `has` names the functions the job has."""
        self._named = None if policy == FASTEST else Rank(int(policy))
        self._has = frozenset(has)
        self._holders: dict[str, Rank] = {}
        self._lost: set[str] = set()  # named roles whose rank is dead, and that has been said
        self._stale: set[str] = set()  # resolved before anything was measured
        self._is_calibrated = False

    def holder(
        self,
        role: str,
        living: Collection[Rank],
        fastest: Callable[[], Rank],
        *,
        tried: Collection[Rank] = (),
    ) -> tuple[Rank | None, str]:
        """Who has `role` now, None for nobody, and why, in words, if that changed; else "".

        `fastest` is asked only when it is needed, and must name one of the living. Ranks in
        `tried` have failed on this occasion and are passed over; a holder that is passed over
        has lost the role for good, unless all were tried.
        """
        if role == "metrics":
            return (min(living, default=None) if role in self._has else None), ""
        if role not in ROLES:
            raise WeBroke(f"there is no role {role!r}")
        if role != "checkpoint" and role not in self._has:
            return None, ""
        if self._named is not None and role != "checkpoint":
            return self._named_holder(role, self._named, living, tried)
        return self._movable_holder(role, living, fastest, tried)

    def recalibrated(self) -> None:
        """Costs are known now, for the first time: what `fastest` gave is asked for once more."""
        if self._named is None and not self._is_calibrated:
            self._is_calibrated = True
            self._stale = set(self._holders)

    def _named_holder(
        self, role: str, named: Rank, living: Collection[Rank], tried: Collection[Rank]
    ) -> tuple[Rank | None, str]:
        if named in living:
            was_lost = role in self._lost
            self._lost.discard(role)
            holder = None if named in tried else named
            return holder, f"rank {named} is back and has the {role} role" if was_lost else ""
        if role in self._lost:
            return None, ""
        self._lost.add(role)
        return None, f"rank {named} is dead, and the {role} role was given to it alone: it ends"

    def _movable_holder(
        self,
        role: str,
        living: Collection[Rank],
        fastest: Callable[[], Rank],
        tried: Collection[Rank],
    ) -> tuple[Rank | None, str]:
        before = self._holders.get(role)
        fit = [rank for rank in living if rank not in tried]
        if not fit:
            return None, f"no rank is left for the {role} role: {_tried(living, tried)}"
        if before in fit and role not in self._stale:
            return before, ""
        chosen, why = self._choose(fit, fastest, first=before is None)
        self._holders[role] = chosen
        self._stale.discard(role)
        if chosen == before:
            return chosen, ""
        if before is None:
            return chosen, f"rank {chosen} has the {role} role: {why}"
        cause = f"rank {before} " + (
            "is dead" if before not in living else "failed" if before in tried else "is slower"
        )
        return chosen, f"the {role} role goes to rank {chosen}, {why}: {cause}"

    def _choose(
        self, fit: list[Rank], fastest: Callable[[], Rank], *, first: bool
    ) -> tuple[Rank, str]:
        """One of those who may, and what it is chosen for."""
        if self._named is not None:
            if first and self._named in fit:
                return self._named, "it was named"
            return min(fit), "the lowest living"
        quickest = fastest()
        if quickest in fit:
            return quickest, "the fastest living"
        return min(fit), "the lowest living that has not failed"


def _tried(living: Collection[Rank], tried: Collection[Rank]) -> str:
    failed = sorted(rank for rank in living if rank in tried)
    return f"ranks {', '.join(map(str, failed))} failed" if failed else "none lives"
