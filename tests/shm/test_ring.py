"""Messages of every size come through whole, in order; bad ones are named and do not stop it."""

from __future__ import annotations

import random
import time

import pytest

from flodl_shm.errors import PeerBroke, PeersLost, WeBroke
from flodl_shm.shm import ring as module
from flodl_shm.shm.frame import FRAME, BadFrame
from flodl_shm.shm.ring import DATA_AT, HEAD_AT, MIN_CAPACITY, TAIL_AT, Reader, Ring, Writer

CAPACITY = 1024


class Pair:
    """Both ends over one piece of memory, and the bells they rang."""

    def __init__(self, capacity: int = CAPACITY, **reader_options) -> None:
        self.memory = memoryview(bytearray(Ring.size_for(capacity)))
        self.ring = Ring(self.memory, create=True)
        self.rang = 0
        self.writer = Writer(self.ring, ring_bell=self._count, peer="the launcher")
        self.reader = Reader(Ring(self.memory), peer="rank 3", **reader_options)
        self.got: list[bytes | BadFrame] = []

    def _count(self) -> None:
        self.rang += 1

    def send(self, body: bytes) -> None:
        """Send with a reader that makes room."""
        deadline_ns = time.monotonic_ns() + 5_000_000_000
        self.writer.send(body, deadline_ns=deadline_ns, wait=self._read_meanwhile)

    def _read_meanwhile(self, ready, _timeout_ns) -> bool:
        self.got += self.reader.read_all()
        return ready()

    def take_all(self) -> list[bytes | BadFrame]:
        got, self.got = self.got + self.reader.read_all(), []
        return got

    def flip(self, position: int) -> None:
        """Spoil one byte at a position since the beginning of the ring."""
        self.memory[DATA_AT + position % self.ring.capacity] ^= 0x40


@pytest.fixture
def pair():
    return Pair()


SIZES = [0, 1, 7, 8, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY, 3_000_000]
PIECE = CAPACITY // 2 - FRAME.size


@pytest.mark.parametrize("size", [*SIZES, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
@pytest.mark.parametrize("start", [0, *(CAPACITY - before for before in (8, 16, 24, 40))])
def test_every_size_from_every_place(size, start):
    # Starts 8, 16, 24 and 40 before the end wrap the header, end with it, or wrap the body.
    pair = Pair()
    while left := start - pair.ring.head.load():
        pair.send(bytes(64 if left > 200 else left - FRAME.size))
        assert len(pair.take_all()) == 1
    assert pair.ring.head.load() == start
    body = random.Random(size).randbytes(size)
    pair.send(body)
    pair.send(b"next")
    assert pair.take_all() == [body, b"next"]
    assert pair.ring.tail.load() == pair.ring.head.load()
    assert not pair.reader.has_data()


def test_an_empty_ring_gives_none(pair):
    assert pair.reader.read() is None
    assert pair.reader.read_all() == []
    assert not pair.reader.has_data()


def test_memoryviews_are_taken_too(pair):
    pair.send(memoryview(b"abcdef")[1:3])
    assert pair.take_all() == [b"bc"]


@pytest.mark.parametrize("body", [b"12345678", memoryview(b"12345678")], ids=type)
def test_publish_order_is_body_then_head_then_bell(pair, body):
    seen = []
    ring = pair.ring
    real_store = ring.head.store

    def store(value):
        seen.append(("head", value, ring.get(FRAME.size, 8)))
        real_store(value)

    pair.writer._store_head = store
    pair.writer._bell = lambda: seen.append(("bell", ring.head.load()))
    pair.writer.send(body, deadline_ns=0)
    assert seen == [("head", 32, b"12345678"), ("bell", 32)]


def test_a_reader_gives_the_room_back_with_a_bell(pair):
    rang = []
    reader = Reader(pair.ring, peer="rank 3", ring_bell=lambda: rang.append(pair.ring.tail.load()))
    pair.send(b"x")
    assert reader.read() == b"x"
    assert rang == [32]


def test_both_ends_can_be_opened_again(pair):
    pair.send(b"one")
    pair.send(b"two")
    assert pair.reader.read() == b"one"
    Writer(pair.ring, ring_bell=lambda: None, peer="x").send(b"three", deadline_ns=0)
    assert Reader(pair.ring, peer="x").read_all() == [b"two", b"three"]


def test_a_full_ring_names_whom_it_waited_for(pair):
    body = bytes(PIECE)
    for _ in range(2):
        pair.writer.send(body, deadline_ns=0)
    with pytest.raises(PeersLost, match=r"waited .* s for the launcher to read") as lost:
        pair.writer.send(b"x", deadline_ns=time.monotonic_ns() + 3_000_000)
    assert lost.value.exit_code == 4
    assert "more shared memory would not help" in lost.value.hint
    assert pair.reader.read_all() == [body, body]
    pair.writer.send(b"y", deadline_ns=0)
    assert pair.reader.read() == b"y"


def test_a_full_ring_waits_by_what_it_is_given(pair):
    asked = []
    for _ in range(2):
        pair.writer.send(bytes(PIECE), deadline_ns=0)

    def wait(ready, timeout_ns):
        asked.append((ready(), timeout_ns))
        pair.reader.read()
        return ready()

    pair.writer.send(b"x", deadline_ns=time.monotonic_ns() + 10**9, wait=wait)
    assert len(asked) == 1
    assert asked[0][0] is False
    assert 0 < asked[0][1] <= 10**9


def test_without_a_bell_of_its_own_a_writer_looks_again(pair, monkeypatch):
    for _ in range(2):
        pair.writer.send(bytes(PIECE), deadline_ns=0)
    monkeypatch.setattr(module.time, "sleep", lambda _: pair.reader.read())
    pair.writer.send(b"x", deadline_ns=time.monotonic_ns() + 10**9)
    assert pair.reader.read_all()[-1] == b"x"


def test_a_spoiled_body_is_reported_and_skipped(pair):
    for body in (b"before", b"spoiled!", b"after"):
        pair.send(body)
    pair.flip(32 + FRAME.size)
    before, bad, after = pair.take_all()
    assert (before, after) == (b"before", b"after")
    assert isinstance(bad, BadFrame)
    assert (bad.peer, bad.sequence, bad.body_bytes) == ("rank 3", 32, 8)
    assert bad.sentence() == (
        "dropped a message from rank 3: its checksum does not match (whole of 8 bytes at 32)"
    )


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_spoiled_piece_drops_its_message_once(piece):
    pair = Pair(8192)
    limit = pair.ring.piece_bytes
    seen = []

    def spoil_and_read(ready, _timeout_ns):
        seen.append(1)
        pair.got += pair.reader.read_all()
        return ready()

    real = pair.writer._store_head

    def store(head):
        real(head)
        if store.count == piece:
            pair.flip(head - 8)  # in the last word of the frame, padding is at its end
        store.count += 1

    store.count = 0
    pair.writer._store_head = store
    deadline_ns = time.monotonic_ns() + 5_000_000_000
    pair.writer.send(bytes(3 * limit), deadline_ns=deadline_ns, wait=spoil_and_read)
    pair.send(b"after")
    bad, after = pair.take_all()
    assert isinstance(bad, BadFrame)
    assert "checksum" in bad.why
    assert after == b"after"


@pytest.mark.parametrize("offset", range(FRAME.size))
def test_a_scribbled_header_names_the_peer_and_later_messages_flow(pair, offset):
    pair.send(b"one")
    pair.send(b"two")
    pair.flip(offset)
    with pytest.raises(PeerBroke, match="rank 3 wrote no frame header at 0"):
        pair.reader.read()
    assert pair.reader.read() is None
    pair.send(b"three")
    assert pair.take_all() == [b"three"]


def test_a_frame_of_an_older_lap_is_no_frame(pair):
    pair.send(bytes(PIECE))
    pair.send(bytes(PIECE))
    assert len(pair.take_all()) == 2
    pair.ring.head.store(CAPACITY + 512)  # published without being written
    with pytest.raises(PeerBroke, match="sequence 0"):
        pair.reader.read()


def test_good_messages_before_a_broken_header_are_not_lost(pair):
    pair.send(b"good")
    pair.send(b"broken")
    pair.flip(32)
    assert pair.reader.read_all() == [b"good"]
    assert pair.reader.has_data()
    with pytest.raises(PeerBroke):
        pair.reader.read_all()
    assert pair.reader.read_all() == []


@pytest.mark.parametrize("head", [3, CAPACITY + 8, 2**64 - 8])
def test_a_scribbled_head_names_the_peer_until_it_is_mended(pair, head):
    pair.memory[HEAD_AT : HEAD_AT + 8].cast("Q")[0] = head
    for _ in range(2):
        with pytest.raises(PeerBroke, match="rank 3 published"):
            pair.reader.read()
    pair.writer.send(b"mended", deadline_ns=0)
    assert pair.reader.read() == b"mended"


@pytest.mark.parametrize("tail", [8, 2**64 - 8])
def test_a_scribbled_tail_names_the_peer(pair, tail):
    pair.memory[TAIL_AT : TAIL_AT + 8].cast("Q")[0] = tail
    with pytest.raises(PeerBroke, match="the launcher says it has read"):
        pair.writer.send(b"x", deadline_ns=0)


def test_a_message_cut_off_by_its_writer_is_reported(pair):
    with pytest.raises(PeersLost):
        pair.writer.send(bytes(3 * CAPACITY), deadline_ns=0)
    assert pair.reader.read() is None
    pair.send(b"small")
    pair.send(bytes(2 * CAPACITY))
    cut, small, large = pair.take_all()
    assert isinstance(cut, BadFrame)
    assert "gave up after" in cut.why
    assert (small, large) == (b"small", bytes(2 * CAPACITY))


def test_a_message_both_spoiled_and_cut_off_takes_no_other_with_it(pair):
    with pytest.raises(PeersLost):
        pair.writer.send(bytes(3 * CAPACITY), deadline_ns=0)
    pair.flip(FRAME.size)
    assert "checksum" in pair.reader.read().why
    assert pair.reader.read() is None
    pair.send(b"small")
    assert pair.take_all() == [b"small"]


def test_pieces_without_a_beginning_are_dropped(pair):
    pair.writer.send(b"x", deadline_ns=0, kind=module.PIECE)
    pair.writer.send(b"y", deadline_ns=0, kind=module.PIECE)
    pair.writer.send(b"z", deadline_ns=0, kind=module.LAST)
    pair.send(b"after")
    bad, after = pair.take_all()
    assert isinstance(bad, BadFrame)
    assert "beginning is missing" in bad.why
    assert after == b"after"


def test_a_message_over_the_limit_is_dropped_before_it_fills_memory():
    pair = Pair(max_message=2000)
    pair.send(bytes(2000))
    pair.send(bytes(2001))
    pair.send(b"after")
    whole, bad, after = pair.take_all()
    assert whole == bytes(2000)
    assert isinstance(bad, BadFrame)
    assert "larger than 2000 bytes" in bad.why
    assert after == b"after"


def test_no_memory_for_a_body_loses_the_message_not_the_slot(pair, monkeypatch):
    pair.send(b"first")
    pair.send(b"second")
    real = pair.reader._ring.get

    def no_memory(position, count):
        if count == 5:
            raise MemoryError
        return real(position, count)

    monkeypatch.setattr(pair.reader._ring, "get", no_memory)
    bad = pair.reader.read()
    assert isinstance(bad, BadFrame)
    assert bad.why == "no memory for it"
    assert pair.reader.read() == b"second"


@pytest.mark.parametrize("raising", [0, 31, 32])
def test_a_handler_that_raises_never_keeps_the_slot(pair, raising):
    # 32 frames fill the ring: first, last, and one wrap-around later.
    delivered = []
    for turn in range(1000):
        pair.writer.send(turn.to_bytes(8, "little"), deadline_ns=0)
        try:
            message = pair.reader.read()
            if turn == raising:
                raise KeyError("handler")
            delivered.append(int.from_bytes(message, "little"))
        except KeyError:
            assert turn == raising
    assert delivered == [turn for turn in range(1000) if turn != raising]


def test_a_signal_between_the_two_head_updates_overwrites_nothing(pair):
    def interrupted(_value):
        raise KeyboardInterrupt

    whole, pair.writer._store_head = pair.writer._store_head, interrupted
    with pytest.raises(KeyboardInterrupt):
        pair.writer.send(b"first", deadline_ns=0)
    pair.writer._store_head = whole
    pair.writer.send(b"second", deadline_ns=0)
    assert pair.take_all() == [b"first", b"second"]


@pytest.mark.parametrize("asked", [0, 1, MIN_CAPACITY, 1000, 4096])
def test_size_for_gives_at_least_what_was_asked(asked):
    ring, least = (
        Ring(memoryview(bytearray(Ring.size_for(asked))), create=True),
        max(asked, MIN_CAPACITY),
    )
    assert least <= ring.capacity < least + 64
    assert Ring.size_for(ring.capacity) == DATA_AT + ring.capacity


def test_memory_too_small_without_a_ring_or_with_another_is_refused(pair):
    with pytest.raises(WeBroke, match="does not fit into 447 bytes"):
        Ring(memoryview(bytearray(DATA_AT + MIN_CAPACITY - 1)), create=True)
    with pytest.raises(WeBroke, match="no ring of 256 bytes here"):
        Ring(memoryview(bytearray(Ring.size_for(MIN_CAPACITY))))
    with pytest.raises(WeBroke, match="no ring of 960 bytes here"):
        Ring(pair.memory[:-64])
