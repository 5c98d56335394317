"""Where everything lies: tensors in a replica, cells, redo blocks and slots in the arena.

Plain arithmetic that every process repeats and must repeat alike, so it is pure: it knows neither
torch nor shared memory. One replica is one flat space of float32: the parameters, then, from a
block boundary on, the float buffers, since those are averaged with other weights. A fixed grid of
blocks lies over that space; a reduce deals whole blocks, so who computes a block cannot change it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["param", "buffer"]

CELL = 8  # bytes of one cell: an aligned u64 or f64
LINE = 64  # bytes of a cache line: cells of different writers never share one
PAGE = 4096
FLOAT = 4
# Slots whose distance is a large power of two meet in the same cache sets and memory banks at
# every block: two of 256 MiB were averaged in 1.02 to 1.26 of a plain copy, in 0.77 to 0.85 so.
STAGGER = 33 * PAGE
STAGGERED_FROM = 1 << 20  # smaller replicas stay in the caches whole
ALIGN = LINE // FLOAT  # floats: every tensor begins on its own cache line

# 256 KiB: three of them (two sources and the redo block) stay in a 1 MiB L2. Blocks of 64 KiB
# lose 10 to 50 % to call overhead, blocks of 1 MiB gain nothing.
LARGEST_BLOCK = 65_536
SMALLEST_BLOCK = 4_096
LEAST_BLOCKS = 4  # a small model is cut finer, so that every rank of a small rig finds a shard

# cells of one row, by index; line 0 and 1 are written by the row's rank, line 2 by the launcher
ARRIVED = 0  # 2 * round + which half below holds that arrival
STATE = 1  # what the rank is doing, for whoever asks who waits for whom
HALVES = (2, 5)  # two sets of {STEPS, MASS, PICKS}: writing one never hides the last arrival
STEPS, MASS, PICKS = 0, 1, 2  # within a half; MASS is a double
PACE = 8  # {version, round, steps done, end of the last, ns per step}; version odd: in writing
GONE = 16  # 1 once the row's process is known dead; never cleared
ROW_BYTES = 3 * LINE

# cells of one shard, by index; written by the shard's worker
VALID = 0  # (round << TAG) + blocks whose mean stands in the redo block
DONE = 1  # (round << TAG) + blocks that are in every living member's slot
CLOSED = 8  # round: the shard is finished
SUMS = 16  # two halves of 1 + slots doubles: |mean|^2, then |x - mean|^2 per source
TAG = 24  # bits for blocks


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What is known of one tensor before the arena exists. `dtype` is torch's word: "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place: `numel` floats from `offset` (floats from the start of the replica)."""

    name: str
    numel: int
    offset: int
    kind: Kind
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks over one replica of `params` and `buffers` floats.

    Block b of `first_buffer_block` and up lies in the buffer region. The last block of each region
    may be short: the floats between the regions belong to no block.
    """

    params: int
    buffers: int
    block_floats: int
    first_buffer_block: int
    blocks: int

    @property
    def buffer_start(self) -> int:
        """First float of the buffer region."""
        return self.first_buffer_block * self.block_floats

    @property
    def floats(self) -> int:
        """Floats of one replica, the gap between the regions included."""
        return self.buffer_start + self.buffers if self.buffers else self.params

    def bounds(self, block: int) -> tuple[int, int]:
        """Floats [low, high) of a block."""
        low = block * self.block_floats
        end = self.params if block < self.first_buffer_block else self.buffer_start + self.buffers
        return low, min(low + self.block_floats, end)

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """Blocks [first, stop) of the index-th of `shards` shards."""
        return self.blocks * index // shards, self.blocks * (index + 1) // shards


def plan_grid(params: int, buffers: int) -> Grid:
    """Lay the grid over regions of `params` and `buffers` floats. Raises WeBroke on negatives."""
    if params < 0 or buffers < 0:
        raise WeBroke(f"a replica cannot have {params} parameter and {buffers} buffer floats")
    block = LARGEST_BLOCK
    while block > SMALLEST_BLOCK and params < LEAST_BLOCKS * block:
        block //= 2
    first_buffer_block = -(-params // block)
    return Grid(
        params, buffers, block, first_buffer_block, first_buffer_block - (-buffers // block)
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """A replica's tensors in order, the sizes of its two regions in floats, and a digest.

    Two models with equal digests agree in the names, shapes, dtypes, kinds and order of all
    tensors, so their slots can be averaged float by float.
    """

    entries: tuple[Entry, ...]
    param_floats: int
    buffer_floats: int
    grid: Grid
    digest: str


def plan_layout(tensors: Sequence[TensorFact]) -> Layout:
    """Give every tensor its place, in the order given. Raises WeBroke on a name given twice."""
    if len({fact.name for fact in tensors}) != len(tensors):
        raise WeBroke("two tensors of a replica bear the same name")
    sizes = [math.prod(fact.shape) for fact in tensors]
    used = {"param": 0, "buffer": 0}
    starts = []
    for fact, numel in zip(tensors, sizes, strict=True):
        starts.append(used[fact.kind])
        used[fact.kind] += _up(numel, ALIGN)
    grid = plan_grid(used["param"], used["buffer"])
    base = {"param": 0, "buffer": grid.buffer_start}
    entries = tuple(
        Entry(fact.name, numel, base[fact.kind] + start, fact.kind, fact.shape, fact.dtype)
        for fact, numel, start in zip(tensors, sizes, starts, strict=True)
    )
    return Layout(entries, grid.params, grid.buffers, grid, _digest(tensors))


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """Byte offsets of everything in an arena of `slots` replicas and `rows` incarnations.

    ::

        DEATHS          one cell on its own line; written by the launcher
        row 0 ..        ROW_BYTES each: the cells above
        shard 0 ..      one per slot, shard_bytes each: the cells above
        redo 0 ..       one per slot, redo_bytes each, page-aligned: one block
        slot 0 ..       slot_bytes each, page-aligned: one replica (and a stagger)

    A shard belongs to the slot of the contributor that owns it. Everything begins as zeros.
    """

    grid: Grid
    slots: int
    rows: int
    rows_at: int
    shards_at: int
    shard_bytes: int
    redo_at: int
    redo_bytes: int
    slots_at: int
    slot_bytes: int
    size: int

    def row(self, row: int) -> int:
        """Index of the row's first cell. Raises WeBroke for a row the arena does not have."""
        if not 0 <= row < self.rows:
            raise WeBroke(f"row {row} in an arena of {self.rows} rows")
        return (self.rows_at + row * ROW_BYTES) // CELL

    def shard(self, slot: int) -> int:
        """Index of the first cell of the slot's shard. Raises WeBroke as `row` does."""
        if not 0 <= slot < self.slots:
            raise WeBroke(f"slot {slot} in an arena of {self.slots} slots")
        return (self.shards_at + slot * self.shard_bytes) // CELL

    def sums(self, slot: int, half: int) -> int:
        """Index of the first double of one half of the shard's divergence sums."""
        return self.shard(slot) + SUMS + half * (1 + self.slots)


def plan_arena(*, params: int, buffers: int, slots: int, rows: int) -> ArenaMap:
    """Map an arena for replicas of `params` and `buffers` floats. Raises WeBroke on nonsense."""
    if slots < 1 or rows < slots:
        raise WeBroke(f"an arena needs a row per slot: {slots} slots, {rows} rows")
    grid = plan_grid(params, buffers)
    shards_at = LINE + rows * ROW_BYTES
    shard_bytes = _up(SUMS * CELL + 2 * (1 + slots) * CELL, LINE)
    redo_at = _up(shards_at + slots * shard_bytes, PAGE)
    redo_bytes = _up(grid.block_floats * FLOAT, PAGE)
    slots_at = redo_at + slots * redo_bytes
    slot_bytes = _up(max(grid.floats, 1) * FLOAT, PAGE)
    if slot_bytes >= STAGGERED_FROM:
        slot_bytes += STAGGER
    return ArenaMap(
        grid=grid,
        slots=slots,
        rows=rows,
        rows_at=LINE,
        shards_at=shards_at,
        shard_bytes=shard_bytes,
        redo_at=redo_at,
        redo_bytes=redo_bytes,
        slots_at=slots_at,
        slot_bytes=slot_bytes,
        size=slots_at + slots * slot_bytes,
    )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _digest(tensors: Sequence[TensorFact]) -> str:
    """sha256 over one line per tensor; repr of the name keeps odd names from faking a line."""
    lines = (f"{t.name!r} {t.shape} {t.dtype} {t.kind}\n" for t in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
