"""The arithmetic every process repeats: nothing overlaps, everything is aligned, digests tell."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.errors import WeBroke
from flodl_shm.wire.layout import (
    ALIGN,
    CELL,
    FLOAT,
    LARGEST_BLOCK,
    LINE,
    PAGE,
    SMALLEST_BLOCK,
    TensorFact,
    plan_arena,
    plan_grid,
    plan_layout,
)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
kinds = st.sampled_from(["param", "buffer"])
facts = st.lists(st.tuples(shapes, kinds), max_size=12).map(
    lambda drawn: [
        TensorFact(f"t{i}", shape, "float32", kind) for i, (shape, kind) in enumerate(drawn)
    ]
)


@given(facts)
def test_every_tensor_has_its_own_aligned_floats(tensors):
    layout = plan_layout(tensors)
    taken = sorted((e.offset, e.offset + e.numel) for e in layout.entries if e.numel)
    assert all(start % ALIGN == 0 for start, _ in taken)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert [e.name for e in layout.entries] == [t.name for t in tensors]
    for entry in layout.entries:
        start = 0 if entry.kind == "param" else layout.grid.buffer_start
        size = layout.param_floats if entry.kind == "param" else layout.buffer_floats
        assert start <= entry.offset <= entry.offset + entry.numel <= start + size


def test_a_scalar_takes_one_float_and_an_empty_tensor_none():
    scalar, empty = plan_layout(
        [TensorFact("s", (), "float32", "param"), TensorFact("e", (3, 0), "float32", "param")]
    ).entries
    assert (scalar.numel, empty.numel) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        TensorFact("b", (2, 3), "float32", "param"),
        TensorFact("a", (3, 2), "float32", "param"),
        TensorFact("a", (2, 3), "float64", "param"),
        TensorFact("a", (2, 3), "float32", "buffer"),
    ],
)
def test_the_digest_tells_name_shape_dtype_and_kind_apart(other):
    one = TensorFact("a", (2, 3), "float32", "param")
    assert plan_layout([one]).digest != plan_layout([other]).digest
    assert plan_layout([one]).digest == plan_layout([one]).digest


def test_the_digest_tells_order_apart():
    a, b = (TensorFact(name, (2,), "float32", "param") for name in "ab")
    assert plan_layout([a, b]).digest != plan_layout([b, a]).digest


def test_two_tensors_of_one_name_are_refused():
    fact = TensorFact("a", (1,), "float32", "param")
    with pytest.raises(WeBroke, match="same name"):
        plan_layout([fact, fact])


@given(st.integers(0, 2_000_000), st.integers(0, 300_000), st.integers(1, 9))
def test_shards_cover_each_float_of_both_regions_once_in_whole_blocks(params, buffers, shards):
    grid = plan_grid(params, buffers)
    assert SMALLEST_BLOCK <= grid.block_floats <= LARGEST_BLOCK
    runs = [grid.shard(i, shards) for i in range(shards)]
    assert [b for first, stop in runs for b in range(first, stop)] == list(range(grid.blocks))
    bounds = [grid.bounds(b) for b in range(grid.blocks)]
    assert all(low % grid.block_floats == 0 and low < high for low, high in bounds)
    split = grid.first_buffer_block
    assert sum(high - low for low, high in bounds[:split]) == params
    assert sum(high - low for low, high in bounds[split:]) == buffers
    assert all(low >= grid.buffer_start for low, _ in bounds[split:])
    assert grid.floats == max([high for _, high in bounds], default=0)


@pytest.mark.parametrize(("params", "floats"), [(1, 4096), (262_143, 32_768), (262_144, 65_536)])
def test_small_models_are_cut_finer(params, floats):
    assert plan_grid(params, 0).block_floats == floats


@given(st.integers(0, 500_000), st.integers(0, 5_000), st.integers(1, 16), st.integers(0, 8))
def test_nothing_in_the_arena_overlaps(params, buffers, slots, spare):
    m = plan_arena(params=params, buffers=buffers, slots=slots, rows=slots + spare)
    ends = [LINE]
    for row in range(m.rows):
        assert m.row(row) * CELL == ends[-1]
        ends.append(ends[-1] + 3 * LINE)
    for slot in range(slots):
        assert m.shard(slot) * CELL == ends[-1]
        assert m.sums(slot, 1) + 1 + slots <= m.shard(slot) + m.shard_bytes // CELL
        ends.append(ends[-1] + m.shard_bytes)
    assert ends[-1] <= m.redo_at
    assert m.redo_bytes >= m.grid.block_floats * FLOAT
    assert m.redo_at + slots * m.redo_bytes == m.slots_at
    assert m.slot_bytes >= m.grid.floats * FLOAT
    assert m.slots_at + slots * m.slot_bytes == m.size
    assert all(x % PAGE == 0 for x in (m.redo_at, m.redo_bytes, m.slots_at, m.slot_bytes))


def test_layout_and_arena_agree_on_the_grid():
    tensors = [
        TensorFact("w", (1000, 333), "float32", "param"),
        TensorFact("m", (7,), "float32", "buffer"),
    ]
    layout = plan_layout(tensors)
    arena = plan_arena(params=layout.param_floats, buffers=layout.buffer_floats, slots=2, rows=2)
    assert arena.grid == layout.grid


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_arena(params=1, buffers=0, slots=0, rows=0), "0 slots"),
        (lambda: plan_arena(params=1, buffers=0, slots=3, rows=2), "2 rows"),
        (lambda: plan_grid(-1, 0), "-1 parameter"),
        (lambda: plan_arena(params=1, buffers=0, slots=1, rows=1).row(1), "row 1"),
        (lambda: plan_arena(params=1, buffers=0, slots=1, rows=1).shard(-1), "slot -1"),
    ],
)
def test_impossible_arenas_are_our_bug(call, says):
    with pytest.raises(WeBroke, match=says):
        call()
