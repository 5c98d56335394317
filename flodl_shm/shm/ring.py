"""A byte ring from one writer to one reader in shared memory, with frames in it.

    0    magic     u64    written by: the creator
    8    capacity  u64    written by: the creator; bytes of data, a multiple of 64
    64   head      cell   written by: the writer; bytes published since the beginning
    128  tail      cell   written by: the reader; bytes consumed since the beginning
    192  data

Publish order is body, then head, then bell: were head first, the reader would take the bytes of
an older lap for the body; were the bell first, it would wake, see nothing and park again.
It does not know what a body means.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from zlib import crc32

from flodl_shm.errors import PeerBroke, PeersLost, WeBroke
from flodl_shm.shm.cell import Cell, words
from flodl_shm.shm.fence import STRONG_ORDER, order
from flodl_shm.shm.frame import (
    CHECKED,
    FIRST,
    FRAME,
    FRAME_BYTES,
    KINDS,
    LAST,
    PIECE,
    WHOLE,
    BadFrame,
    pack_checksum,
    pack_head,
    span,
)
from flodl_shm.wire.layout import CELL, LINE

if TYPE_CHECKING:
    from collections.abc import Callable

    Wait = Callable[[Callable[[], bool], int], bool]  # (ready, timeout in ns) -> came true

MAGIC = 0x31474E49_52444C46  # "FLDRING1" as it lies in memory
HEAD_AT = LINE
TAIL_AT = 2 * LINE
DATA_AT = 3 * LINE
MIN_CAPACITY = 256
MAX_MESSAGE = 1 << 30  # a reader buffers pieces up to here, then the message is a bad frame
POLL_S = 0.0005  # only for a writer without a bell of its own


class Ring:
    """The memory and its two cursors. Positions only grow; a place is position % capacity."""

    def __init__(self, view: memoryview, *, create: bool = False) -> None:
        """Lay a ring over all of `view`, or find the one that lies there.

        Raises WeBroke when there is none or it does not fit.
        """
        capacity = (len(view) - DATA_AT) // LINE * LINE
        if not MIN_CAPACITY <= capacity < 1 << 32:
            raise WeBroke(f"a ring does not fit into {len(view)} bytes")
        start = words(view[:DATA_AT])
        if create:
            start[HEAD_AT // CELL] = start[TAIL_AT // CELL] = 0
            start[1] = capacity
            order()  # the magic last: a ring that is seen is complete
            start[0] = MAGIC
        elif start[0] != MAGIC or start[1] != capacity:
            raise WeBroke(f"no ring of {capacity} bytes here: starts with {start[0]:#x}")
        self.capacity = capacity
        self.head = Cell(view, HEAD_AT)
        self.tail = Cell(view, TAIL_AT)
        self.data = view[DATA_AT : DATA_AT + capacity]
        # Half a ring at most: while the reader takes one piece the writer lays the next.
        self.piece_bytes = capacity // 2 - FRAME.size

    @classmethod
    def size_for(cls, capacity: int) -> int:
        """Return the bytes of shared memory for a ring of at least `capacity` bytes of data."""
        lines = -(-max(capacity, MIN_CAPACITY) // LINE)
        return DATA_AT + lines * LINE

    def put(self, position: int, data: bytes | memoryview) -> None:
        """Copy `data` to its place, around the end where need be."""
        at = position % self.capacity
        end = at + len(data)
        if end <= self.capacity:
            self.data[at:end] = data
        else:
            first = self.capacity - at
            self.data[at:] = data[:first]
            self.data[: end - self.capacity] = data[first:]

    def get(self, position: int, count: int) -> bytes:
        """Copy `count` bytes out, around the end where need be."""
        at = position % self.capacity
        end = at + count
        if end <= self.capacity:
            return self.data[at:end].tobytes()
        return self.data[at:].tobytes() + self.data[: end - self.capacity].tobytes()


class Writer:
    """The one writer of a ring, used by one thread."""

    def __init__(self, ring: Ring, *, ring_bell: Callable[[], None], peer: str) -> None:
        """Write on from where the ring stands; `peer` says who reads, in words for a message."""
        self._ring = ring
        self._bell = ring_bell
        self._peer = peer
        self._head = ring.head.load()
        # As far as the reader had given room when last asked. Room is never taken back, so to look
        # at its cursor, a cache line of the other core, can wait until this is used up.
        self._room_to = self._head
        self._limit, self._capacity, self._data = ring.piece_bytes, ring.capacity, ring.data
        self._store_head = ring.head.store

    def send(
        self,
        body: bytes | memoryview,
        *,
        deadline_ns: int,
        wait: Wait | None = None,
        kind: int = WHOLE,
    ) -> None:
        """Write one message of any size. `kind` is for the pieces of a large one.

        While the ring is full, waits until `deadline_ns` (time.monotonic_ns) by
        `wait(ready, timeout_ns)`, else by looking every half millisecond. Raises PeersLost when
        the peer has not read by then, naming it; the reader is told of a message cut off so.
        """
        # Every message of a rank goes through here, and a call costs 50 ns of some 1,300: what
        # `span`, `put` and `order` do in the common case is spelled out.
        length = len(body)
        if length > self._limit:
            self._send_pieces(memoryview(body), deadline_ns, wait)
            return
        at = self._head
        head = at + FRAME_BYTES + (length + 7 & ~7)
        if head > self._room_to:
            self._make_room(head - at, deadline_ns, wait)
        checked = pack_head(length, kind, at, crc32(body))
        # Joined here, stored once: a slice of shared memory less.
        frame = b"".join((checked, pack_checksum(crc32(checked)), body))
        place = at % self._capacity
        end = place + FRAME_BYTES + length
        if end <= self._capacity:
            self._data[place:end] = frame
        else:
            self._ring.put(at, frame)
        if not STRONG_ORDER:
            order()
        # The private copy first: an exception from a signal handler in between leaves a whole
        # frame that the next one publishes too; the other way it would be overwritten.
        self._head = head
        self._store_head(head)
        self._bell()

    def _send_pieces(self, rest: memoryview, deadline_ns: int, wait: Wait | None) -> None:
        kind, limit = FIRST, self._limit
        while rest:
            part, rest = rest[:limit], rest[limit:]
            self.send(part, deadline_ns=deadline_ns, wait=wait, kind=kind if rest else LAST)
            kind = PIECE

    def _make_room(self, need: int, deadline_ns: int, wait: Wait | None) -> None:
        started = time.monotonic_ns()
        if self._free() >= need:
            return
        left = deadline_ns - started
        if left > 0 and (wait or _poll)(lambda: self._free() >= need, left):
            return
        if self._free() >= need:
            return
        waited = (time.monotonic_ns() - started) / 1e9
        raise PeersLost(
            f"waited {waited:.3g} s for {self._peer} to read: {need} bytes do not fit, "
            f"{self._free()} of {self._ring.capacity} are free",
            hint=f"{self._peer} is stopped, stuck or gone; more shared memory would not help.",
        )

    def _free(self) -> int:
        tail = self._ring.tail.load()
        used = self._head - tail
        if not 0 <= used <= self._ring.capacity:
            raise PeerBroke(
                f"{self._peer} says it has read {tail} bytes of the {self._head} written"
            )
        self._room_to = tail + self._ring.capacity
        return self._ring.capacity - used


def _poll(ready: Callable[[], bool], timeout_ns: int) -> bool:
    deadline = time.monotonic_ns() + timeout_ns
    while not ready():
        if time.monotonic_ns() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


class Reader:
    """The one reader of a ring, used by one thread. A frame's room is given back before its
    message is handed out, so nothing a handler raises can block the writer.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        peer: str,
        ring_bell: Callable[[], None] | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        """Read on from where the ring stands. `ring_bell` wakes a writer that waits for room."""
        self._ring = ring
        self._peer = peer
        self._bell = ring_bell
        self._max = max_message
        self._tail = ring.tail.load()
        self._parts: list[bytes] | None = None  # of the message whose pieces are coming in
        self._parts_bytes = 0
        self._dropping = False  # the rest of a message that was reported already
        self._owed: PeerBroke | None = None  # found by read_all behind messages it returned

    def has_data(self) -> bool:
        """Say whether `read` would have something to look at."""
        return self._owed is not None or self._ring.head.load() != self._tail

    def read(self) -> bytes | BadFrame | None:
        """Return the next whole message, a bad one, or None when there is none yet.

        Raises PeerBroke, naming the peer, when a frame header is not one. All that was published
        until then is given up, as there is no telling where the next frame begins; later
        messages flow.
        """
        if self._owed is not None:
            owed, self._owed = self._owed, None
            raise owed
        while self._ring.head.load() != self._tail:
            message = self._read_frame()
            if message is not None:
                return message
        return None

    def read_all(self) -> list[bytes | BadFrame]:
        """Return what `read` gives until there is none, at most what was published by now.

        When PeerBroke comes behind good messages these are returned first; the next call raises.
        """
        end = self._ring.head.load()
        out: list[bytes | BadFrame] = [] if self._owed is not None else self._take_plain(end)
        try:
            while self._tail < end or not out:
                message = self.read()
                if message is None:
                    break
                out.append(message)
        except PeerBroke as broke:
            if not out:
                raise
            self._owed = broke
        return out

    def _take_plain(self, head: int) -> list[bytes | BadFrame]:
        """Sound whole messages from the tail on, up to the first frame that is anything else.

        Copied out at once and released at once: half the time per message of `_read_frame`,
        which has the rest, and the last word on every frame that is not plain.
        """
        ring, start = self._ring, self._tail
        size = head - start
        out: list[bytes | BadFrame] = []
        if self._parts is not None or not FRAME_BYTES <= size <= ring.capacity:
            return out
        order()  # the head before the bytes it covers
        at, unpack, append = 0, FRAME.unpack_from, out.append
        try:
            raw = ring.get(start, size)
            while at + FRAME_BYTES <= size:
                length, kind, sequence, crc, own_crc = unpack(raw, at)
                body_at = at + FRAME_BYTES
                body = raw[body_at : body_at + length]
                after = body_at + (length + 7 & ~7)
                if (
                    own_crc != crc32(raw[at : at + CHECKED])
                    or crc != crc32(body)
                    or kind != WHOLE
                    or sequence != start + at
                    or after > size
                ):
                    break
                append(body)
                at = after
        except MemoryError:
            return []  # nothing is released: frame by frame, only those that are too large get lost
        if out:
            self._dropping = False
            self._release(start + at)
        return out

    def _read_frame(self) -> bytes | BadFrame | None:
        length, kind, crc = self._header()
        sequence = self._tail
        if kind in (WHOLE, FIRST):
            self._dropping = False
            if self._parts is not None:  # the frame at hand stays and comes next
                self._parts = None
                why = f"its writer gave up after {self._parts_bytes} bytes"
                return BadFrame(self._peer, sequence, PIECE, 0, why)
        try:
            body = self._ring.get(sequence + FRAME_BYTES, length)
        except MemoryError:
            return self._lost(kind, length, sequence, "no memory for it")
        finally:
            self._release(sequence + span(length))
        is_good = crc == crc32(body)
        if kind == WHOLE and is_good:  # nothing to join, and nothing is being dropped, see above
            return body
        return self._assembled(kind, body, is_good=is_good, sequence=sequence)

    def _header(self) -> tuple[int, int, int]:
        """Check the header at the tail; return length, kind, body checksum."""
        ring, at = self._ring, self._tail
        head = ring.head.load()
        order()  # the head before the bytes it covers
        ready = head - at
        if not FRAME_BYTES <= ready <= ring.capacity:
            # Nothing is given up: the writer keeps its own count, the next frame may mend it.
            raise PeerBroke(f"{self._peer} published {ready} bytes in a ring of {ring.capacity}")
        raw = ring.get(at, FRAME_BYTES)
        length, kind, sequence, crc, own_crc = FRAME.unpack(raw)
        if own_crc != crc32(raw[:CHECKED]):
            fault = f"its checksum is {own_crc:#010x}"
        elif kind not in KINDS or sequence != at or span(length) > ready:
            fault = f"kind {kind}, sequence {sequence}, length {length} with {ready} bytes there"
        else:
            return length, kind, crc
        self._resume(head)
        raise PeerBroke(f"{self._peer} wrote no frame header at {at}: {fault}")

    def _assembled(
        self, kind: int, body: bytes, *, is_good: bool, sequence: int
    ) -> bytes | BadFrame | None:
        """Join pieces; None while more must come or the rest of a lost message goes by."""
        if self._dropping:
            self._dropping = kind != LAST
            return None
        if not is_good:
            return self._lost(kind, len(body), sequence, "its checksum does not match")
        if kind == WHOLE:
            return body
        if kind == FIRST:
            self._parts, self._parts_bytes = [], 0
        if self._parts is None:
            return self._lost(kind, len(body), sequence, "its beginning is missing")
        self._parts.append(body)
        self._parts_bytes += len(body)
        if self._parts_bytes > self._max:
            return self._lost(kind, len(body), sequence, f"it is larger than {self._max} bytes")
        if kind != LAST:
            return None
        whole, self._parts = b"".join(self._parts), None
        return whole

    def _lost(self, kind: int, body_bytes: int, sequence: int, why: str) -> BadFrame:
        """Give the message up; the pieces of it still to come will be dropped unreported."""
        self._parts = None
        self._dropping = kind in (FIRST, PIECE)
        return BadFrame(self._peer, sequence, kind, body_bytes, why)

    def _release(self, tail: int) -> None:
        order()  # the copy is made before the room is given back
        self._tail = tail
        self._ring.tail.store(tail)
        if self._bell is not None:
            self._bell()

    def _resume(self, head: int) -> None:
        """Give up all that is published and go on with what comes next."""
        self._parts, self._dropping = None, False
        self._release(head)
