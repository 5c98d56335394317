"""Spans: cutting keeps every position, and a SpanSet is a set."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.spans import SpanSet, cut_back, cut_front, joined, length

spans = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1]))


def positions(runs):
    return [position for start, stop in runs for position in range(start, stop)]


@given(st.lists(spans, max_size=5), st.integers(-2, 50))
def test_cutting_keeps_order_and_loses_nothing(runs, size):
    whole = positions(runs)
    front, rest = list(runs), max(0, size)
    head = cut_front(front, size)
    assert positions(head) == whole[:rest]
    assert positions(front) == whole[rest:]
    back = list(runs)
    tail = cut_back(back, size)
    assert positions(tail) == whole[max(0, len(whole) - rest) :]
    assert positions(back) == whole[: max(0, len(whole) - rest)]


@given(st.lists(spans, max_size=8))
def test_joining_merges_only_neighbours(runs):
    merged = joined(runs)
    assert positions(merged) == positions(runs)
    assert all(a[1] != b[0] for a, b in itertools.pairwise(merged))


@given(st.lists(spans, max_size=10))
def test_a_span_set_tells_what_it_knew(runs):
    held, model = SpanSet(), set()
    for run in runs:
        known = held.add(run)
        new = set(positions([run]))
        assert sorted(positions(known)) == sorted(new & model)
        model |= new
        assert len(held) == len(model)
        assert positions(held.spans()) == sorted(model)
        assert all(a[1] < b[0] for a, b in zip(held.spans(), held.spans()[1:], strict=False))
    assert positions(held.gaps(60)) == sorted(set(range(60)) - model)


def test_lengths_and_gaps_of_nothing():
    assert length([]) == 0
    assert SpanSet().gaps(0) == []
    assert SpanSet().gaps(3) == [(0, 3)]
