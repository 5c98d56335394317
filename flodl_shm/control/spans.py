"""Runs of positions [start, stop): cutting them, counting them, and a set that merges them.

An epoch may have 1e9 picks, so nothing here ever lists single positions. It knows neither ranks
nor rounds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.control.messages import Span


def length(spans: Iterable[Span]) -> int:
    """How many positions the spans hold, each span counted in full."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same positions in the same order, neighbours that continue each other made one."""
    out: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def cut_front(spans: list[Span], size: int) -> list[Span]:
    """Remove the first `size` positions (or all there are) from `spans` and return them."""
    out: list[Span] = []
    while spans and size > 0:
        start, stop = spans[0]
        cut = min(stop, start + size)
        out.append((start, cut))
        size -= cut - start
        if cut == stop:
            del spans[0]
        else:
            spans[0] = (cut, stop)
    return out


def cut_back(spans: list[Span], size: int) -> list[Span]:
    """Remove the last `size` positions (or all there are) and return them, in their order."""
    out: list[Span] = []
    while spans and size > 0:
        start, stop = spans[-1]
        cut = max(start, stop - size)
        out.insert(0, (cut, stop))
        size -= stop - cut
        if cut == start:
            del spans[-1]
        else:
            spans[-1] = (start, cut)
    return out


class SpanSet:
    """A set of positions kept as sorted, disjoint, merged spans."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def spans(self) -> tuple[Span, ...]:
        """The positions in ascending order, as few spans as possible."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, span: Span) -> list[Span]:
        """Put a span in; return the parts of it that were in already."""
        start, stop = span
        if start >= stop:
            return []
        # All spans that overlap or touch the new one become one with it.
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        old = list(zip(self._starts[low:high], self._stops[low:high], strict=True))
        known = [(max(a, start), min(b, stop)) for a, b in old]
        known = [(a, b) for a, b in known if a < b]
        if old:
            start, stop = min(start, old[0][0]), max(stop, old[-1][1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]
        self._count += span[1] - span[0] - length(known)
        return known

    def gaps(self, total: int) -> list[Span]:
        """The positions of [0, total) that are not in the set, ascending."""
        edges = [0, *(edge for span in self.spans() for edge in span), total]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
