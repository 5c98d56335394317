"""Evaluations of the consensus: ordered, awaited, remembered.

One rank scores for all. Which one is a matter of roles; what was asked for and is not answered
yet is kept here, since an answer says its epoch only, and an epoch can be scored several times.
What a value is told to, and when the run ends, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.checkpoint_meta import Evaluation
from flodl_shm.control.messages import Evaluate, Note
from flodl_shm.errors import PeerBroke

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flodl_shm.control.edge import Edge
    from flodl_shm.control.messages import Action, Evaluated
    from flodl_shm.control.roles import Roles
    from flodl_shm.ids import Rank, Round


@dataclass(frozen=True, slots=True)
class Asked:
    """One order to score the state after a round."""

    rank: Rank
    epoch: int
    after: Round
    is_final: bool


class Evaluations:
    """All evaluations of one run; `past` are those of the training before a resume."""

    def __init__(self, roles: Roles, past: Sequence[Evaluation] = ()) -> None:
        self._roles = roles
        self._past = tuple(past)
        self._done: list[tuple[Round, Evaluation]] = []
        self._open: list[Asked] = []
        self._is_due = False

    @property
    def scorer(self) -> Rank | None:
        """Who owes the final evaluation; None while nobody does."""
        return next((asked.rank for asked in self._open if asked.is_final), None)

    def until(self, after: Round) -> tuple[Evaluation, ...]:
        """What is known of states up to that round."""
        return (*self._past, *(one for number, one in self._done if number <= after))

    def wish(self) -> None:
        """A script wants one; it is ordered when `order_due` is asked next."""
        self._is_due = True

    def order_due(self, edge: Edge) -> Iterator[Action]:
        """Order what a script asked for, one at a time: another wish waits for the answer."""
        if self._is_due and edge.after and not self._open:
            yield from self.order(edge)

    def order(self, edge: Edge, *, is_final: bool = False) -> Iterator[Action]:
        """Have the state at the edge scored by whoever has the role, if anybody has."""
        self._is_due = False
        if any(asked.after == edge.after for asked in self._open) and not is_final:
            return
        scorer, why = self._roles.holder("evaluation", edge.living, edge.fastest)
        if why:
            yield Note("roles", why, alert=scorer is None)
        if scorer is not None:
            self._open.append(Asked(scorer, edge.epoch, edge.after, is_final))
            yield Evaluate(rank=scorer, epoch=edge.epoch)

    def take(self, report: Evaluated) -> Asked:
        """What the answer answers; its value is kept. Raises PeerBroke if nobody asked."""
        for asked in self._open:  # a rank answers in the order it was asked
            if (asked.rank, asked.epoch) == (report.rank, report.epoch):
                break
        else:
            raise PeerBroke(f"rank {report.rank} evaluated without being asked")
        self._open.remove(asked)
        if report.value is not None:
            self._done.append((asked.after, Evaluation(report.epoch, report.value)))
        return asked

    def bury(self, rank: Rank) -> Iterator[Action]:
        """The rank is dead: what it was asked is not answered."""
        lost = [asked for asked in self._open if asked.rank == rank]
        self._open = [asked for asked in self._open if asked.rank != rank]
        for asked in lost:
            if not asked.is_final:  # the state it scored is gone by now
                text = f"the evaluation of epoch {asked.epoch} is lost with rank {rank}"
                yield Note("evaluation", text, alert=True)
