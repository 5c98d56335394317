"""One epoch's picks: who may train which, and which of them are in the consensus.

A pick is in exactly one of these places and moves only along the arrows:

    undealt -> held by a rank -> pending in a round -> done (the round has closed)
       ^----------' (given back, or its holder died)

Undealt picks lie in three piles: *reclaimed* (a dead rank held them; dealt first, so that no old
gap stays open), each rank's *reserved* span (its upcoming data is known, so it can be staged), and
the *common* pile nobody has reserved. The pool knows nothing of batches, windows, models or time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.spans import SpanSet, cut_back, cut_front, joined, length
from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flodl_shm.control.messages import Span
    from flodl_shm.ids import Rank, Round


@dataclass(frozen=True, slots=True)
class Coverage:
    """What became of an epoch's picks: done_once + duplicated + missing == picks."""

    picks: int
    done_once: int
    duplicated: int
    missing: int
    dropped: int  # never dealt: the epoch's short tail


class ChunkPool:
    """The books of one epoch, positions 0 .. total of its permutation."""

    def __init__(self, total: int, *, dropped: int = 0) -> None:
        self.total = total
        self.dropped = dropped
        self._reclaimed: list[Span] = []
        self._common: list[Span] = joined([(0, total)])
        self._reserved: dict[Rank, list[Span]] = {}
        self._held: dict[Rank, list[Span]] = {}
        self._pending: dict[Round, list[Span]] = {}
        self._done = SpanSet()
        self._again = SpanSet()  # done more than once: stays empty unless we broke

    @classmethod
    def resumed(cls, total: int, done: Iterable[Span], *, dropped: int = 0) -> ChunkPool:
        """A pool some picks of which were in the consensus before a resume."""
        pool = cls(total, dropped=dropped)
        for span in done:
            if not 0 <= span[0] <= span[1] <= total:
                raise WeBroke(f"a resumed epoch of {total} picks cannot have done {span}")
            pool._close(span)
        pool._common = pool._done.gaps(total)
        return pool

    # ---- dealing ---------------------------------------------------------------------------

    def reserve(self, weights: Mapping[Rank, float], *, unit: int) -> None:
        """Share all undealt picks but the reclaimed ones out anew, contiguous and by weight.

        Spans are whole multiples of `unit` picks, the last one takes what is over. A weight that
        is not a positive number counts as none; without any the ranks share equally.
        """
        ranks = sorted(weights)
        if not ranks:
            return
        pile = sorted([*self._common, *(s for own in self._reserved.values() for s in own)])
        shares = _shares(length(pile) // unit, [weights[rank] for rank in ranks])
        self._common, self._reserved = [], {}
        for rank, share in zip(ranks, shares, strict=True):
            self._reserved[rank] = joined(cut_front(pile, share * unit))
        last = max((r for r, share in zip(ranks, shares, strict=True) if share), default=ranks[-1])
        self._reserved[last] = joined([*self._reserved[last], *pile])

    def take(self, rank: Rank, picks: int, *, unit: int = 1) -> tuple[Span, ...]:
        """Grant up to `picks` picks and hold them for the rank; returns what it got.

        Order: reclaimed, the front of its own span, the common pile, then the tail of the largest
        residue, again and again. The tail, because its owner comes to it last. Short only
        when the pool runs dry; a count that is no multiple of `unit` is rounded down (not
        below one unit's worth) while picks remain, so that a grant does not end inside a batch.
        """
        size = min(picks, self.undealt)
        if unit <= size < self.undealt:
            size -= size % unit
        got = self._draw(self._reclaimed, size)
        for pile in (self._reserved.get(rank, []), self._common):
            got += self._draw(pile, size - length(got))
        while length(got) < size:
            # Ties go to the lower rank: dict order would depend on who reserved when.
            victim = max(sorted(self._reserved), key=lambda r: length(self._reserved[r]))
            got += cut_back(self._reserved[victim], size - length(got))
        return self._hold(rank, got)

    def take_next(self, rank: Rank, picks: int) -> tuple[Span, ...]:
        """Grant reclaimed picks, then those at the lowest positions: dealing never by timing."""
        got = self._draw(self._reclaimed, picks)
        piles = [self._common, *self._reserved.values()]
        while (short := picks - length(got)) > 0 and any(piles):
            lowest = min((pile for pile in piles if pile), key=min)
            lowest.sort()  # given back picks may lie out of order
            start, stop = lowest[0]
            got += cut_front(lowest, min(short, stop - start))
        return self._hold(rank, got)

    def _draw(self, pile: list[Span], size: int) -> list[Span]:
        return cut_front(pile, max(0, size))

    def _hold(self, rank: Rank, got: list[Span]) -> tuple[Span, ...]:
        self._held[rank] = joined([*self._held.get(rank, []), *got])
        return tuple(joined(got))

    # ---- what became of them ---------------------------------------------------------------

    def consume(self, rank: Rank, picks: int, *, round: Round) -> None:  # noqa: A002 our word
        """The rank's arrival in `round` covers the first `picks` it holds. Raises WeBroke."""
        if not 0 <= picks <= self.held(rank):
            raise WeBroke(f"rank {rank} consumed {picks} picks but holds {self.held(rank)}")
        if picks:
            self._pending.setdefault(round, []).extend(cut_front(self._held[rank], picks))

    def give_back(self, rank: Rank) -> int:
        """Return the rank's unused picks to the front of its own span; says how many."""
        back = self._held.pop(rank, [])
        if back:
            self._reserved[rank] = joined([*back, *self._reserved.get(rank, [])])
        return length(back)

    def forfeit(self, rank: Rank) -> int:
        """The rank is dead: what it held is dealt first, what it had reserved is free to all.

        Returns how many held picks came back. What is pending in a round stays there: the
        arrival was complete, so it is in the consensus when that round closes.
        """
        back = self._held.pop(rank, [])
        self._reclaimed = joined(sorted([*self._reclaimed, *back]))
        self._common = joined(sorted([*self._common, *self._reserved.pop(rank, [])]))
        return length(back)

    def commit(self, round: Round) -> None:  # noqa: A002 our word
        """The round has closed: its pending picks are in the consensus."""
        for span in self._pending.pop(round, []):
            self._close(span)

    def _close(self, span: Span) -> None:
        for again in self._done.add(span):
            self._again.add(again)

    # ---- what can be asked -----------------------------------------------------------------

    def held(self, rank: Rank) -> int:
        """Picks granted to the rank and not yet covered by an arrival."""
        return length(self._held.get(rank, []))

    def held_spans(self, rank: Rank) -> tuple[Span, ...]:
        """The same as spans, in the order the rank consumes them."""
        return tuple(self._held.get(rank, []))

    def reserved_spans(self, rank: Rank) -> tuple[Span, ...]:
        """What the rank will be granted next, unless others steal it."""
        return tuple(self._reserved.get(rank, []))

    def done_spans(self) -> tuple[Span, ...]:
        """What is in the consensus, ascending: what a checkpoint keeps of this pool."""
        return self._done.spans()

    @property
    def undealt(self) -> int:
        """Picks that can be granted now."""
        reserved = sum(length(own) for own in self._reserved.values())
        return length(self._reclaimed) + length(self._common) + reserved

    @property
    def pending(self) -> int:
        """Picks covered by an arrival whose round has not closed."""
        return sum(length(spans) for spans in self._pending.values())

    @property
    def done(self) -> int:
        """Picks in the consensus, each counted once."""
        return len(self._done)

    @property
    def finished(self) -> bool:
        """Every dealt pick is in the consensus."""
        return self.done == self.total

    def coverage(self) -> Coverage:
        """The epoch's account, for the summary and the simulator's invariant."""
        twice = len(self._again)
        return Coverage(self.total, self.done - twice, twice, self.total - self.done, self.dropped)


def _shares(units: int, weights: Collection[float]) -> list[int]:
    """Split whole units by weight, largest remainder first, ties to the earlier one."""
    sane = [w if math.isfinite(w) and w > 0 else 0.0 for w in weights]
    top = max(sane)
    # Scaled by the largest, so that no sum of weights can overflow.
    scaled = [w / top for w in sane] if top > 0 else [1.0] * len(sane)
    exact = [units * w / sum(scaled) for w in scaled]
    shares = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in order[: units - sum(shares)]:
        shares[i] += 1
    return shares
