"""The world's own books of what entered the consensus, and the promises they are held against.

Kept from what simulated ranks brought to the rounds that closed, never from what the coordinator
says of it. A training that was resumed has the books of the one before as of the round it was
saved after.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.control.spans import length
from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.messages import Committed, End, EpochClosed
    from flodl_shm.control.options import Settled
    from flodl_shm.ids import Rank, Round

Consensus = dict[int, Counter[int]]  # epoch -> how often each of its picks is in


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a rank brings to a round."""

    epoch: int
    picks: tuple[int, ...]
    steps: int  # 0 if it is refused: its picks count as done all the same
    refused: bool = False
    joins: bool = False  # it receives only


@dataclass(slots=True)
class Books:
    """`before` is what was in the consensus when the training was resumed."""

    before: Consensus = field(default_factory=dict)
    rounds_before: int = 0
    brought: dict[Round, dict[Rank, Contribution]] = field(default_factory=dict)
    closed: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)

    def consensus(self, until: Round | None = None) -> Consensus:
        """What is in it, or was when round `until` had closed and no later one."""
        held = {epoch: Counter(picks) for epoch, picks in self.before.items()}
        for number, ranks in self.closed.items():
            if until is None or number <= until:
                for rank in ranks:
                    one = self.brought[number][rank]
                    held.setdefault(one.epoch, Counter()).update(one.picks)
        return held

    def check_commit(self, commit: Committed) -> None:
        """What is said of a round is what its ranks did. Raises WeBroke."""
        order = self.closed.get(commit.round)
        if order is None or order != commit.contributors:
            raise WeBroke(f"round {commit.round} committed {commit.contributors}, closed {order}")
        for rank in order:
            brought, told = self.brought[commit.round][rank], str(rank)
            if commit.picks[told] != len(brought.picks) or commit.mass[told] != brought.steps:
                raise WeBroke(f"round {commit.round}: rank {rank} did {brought}, told {commit}")

    def check_meta(self, meta: CheckpointMeta, after: Round) -> None:
        """A checkpoint says of itself exactly what its state holds. Raises WeBroke."""
        held = {epoch: picks for epoch, picks in self.consensus(after).items() if picks}
        told: dict[int, int] = {}
        for past in meta.closed_epochs:
            told[past.epoch] = past.picks
            if set(held.get(past.epoch, ())) != set(range(past.picks)):
                raise WeBroke(f"save after round {after}: epoch {past.epoch} is not closed")
        for begun in meta.open_epochs:
            told[begun.epoch] = length(begun.done)
            done = {pick for start, stop in begun.done for pick in range(start, stop)}
            if set(held.get(begun.epoch, ())) != done:
                raise WeBroke(f"save after round {after}: {begun} is not what is in it")
        if told.keys() != held.keys() or meta.reduce != self.rounds_before + after:
            raise WeBroke(f"save after round {after} tells of {told}, {meta.reduce} reduces")

    def check_finite(self, end: End, *, raised: bool) -> None:
        """A round without a finite replica ends the training, and nothing else does so.

        Or a script that `raised`. Raises WeBroke.
        """
        broken = {
            number
            for number, came in self.brought.items()
            if all(c.refused for c in came.values() if not c.joins)
        }
        if end.status != "failed" and broken & self.closed.keys():
            raise WeBroke(f"ended {end.status}, nobody is finite after rounds {sorted(broken)}")
        if end.exit_code == 1 and not broken and not raised:
            raise WeBroke(f"ended with {end.reason!r}, but somebody is finite after every round")

    def check_once(self) -> None:
        """No pick is in the consensus twice. Raises WeBroke."""
        for picks in self.consensus().values():
            if any(count != 1 for count in picks.values()):
                raise WeBroke("a pick entered the consensus twice")

    def check_whole(
        self, plan: Settled, closed: Iterable[EpochClosed], dealt: Mapping[int, int]
    ) -> None:
        """The whole training is in it: each dealt pick of each epoch. Raises WeBroke.

        `closed` are all epochs told of, those before a resume first; `dealt` is how many picks an
        epoch had that was begun before it.
        """
        held, told = self.consensus(), {cover.epoch: cover for cover in closed}
        for epoch in range(plan.epochs):
            total = dealt.get(epoch, plan.epoch_picks)
            if set(held.get(epoch, ())) != set(range(total)):
                raise WeBroke(f"epoch {epoch}: not all of {total} picks are in the consensus")
            cover = told.pop(epoch, None)
            if cover is None or (cover.done_once, cover.duplicated, cover.missing) != (total, 0, 0):
                raise WeBroke(f"epoch {epoch}: coverage {cover}")
