"""What is done once for many messages: reading them, giving their room back, asking for room."""

from __future__ import annotations

import pytest

from flodl_shm.errors import PeerBroke
from flodl_shm.shm.frame import FRAME, BadFrame
from flodl_shm.shm.ring import TAIL_AT, Reader, Ring, Writer

CAPACITY = 1024


class Pair:
    """Both ends over one piece of memory; `rang` is where the tail was whenever room came back."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(Ring.size_for(CAPACITY)))
        self.ring = Ring(self.memory, create=True)
        self.rang: list[int] = []
        self.writer = Writer(self.ring, ring_bell=lambda: None, peer="the launcher")
        self.reader = Reader(self.ring, peer="rank 3", ring_bell=self._note)

    def _note(self) -> None:
        self.rang.append(self.ring.tail.load())

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            self.writer.send(body, deadline_ns=0)


@pytest.fixture
def pair():
    return Pair()


def test_room_is_given_back_once(pair):
    pair.send(b"first", b"second", b"third")
    assert pair.reader.read_all() == [b"first", b"second", b"third"]
    assert pair.rang == [96]


def test_around_the_end(pair):
    for turn in range(100):
        bodies = [bytes([turn]) * (turn % 40 + size) for size in range(5)]
        pair.send(*bodies)
        assert pair.reader.read_all() == bodies


def test_a_spoiled_one_in_the_middle_is_reported_in_its_place(pair):
    pair.send(b"first", b"second", b"third")
    pair.memory[192 + 32 + FRAME.size] ^= 1
    first, bad, third = pair.reader.read_all()
    assert (first, third) == (b"first", b"third")
    assert isinstance(bad, BadFrame)
    assert bad.sequence == 32


def test_no_memory_for_all_loses_nothing(pair, monkeypatch):
    pair.send(b"first", b"second")
    real = pair.ring.get

    def no_memory(position, count):
        if count > FRAME.size + 8:
            raise MemoryError
        return real(position, count)

    monkeypatch.setattr(pair.ring, "get", no_memory)
    assert pair.reader.read_all() == [b"first", b"second"]


def test_a_writer_asks_for_room_only_when_what_it_knows_of_is_used_up(pair):
    pair.send(b"x")
    pair.memory[TAIL_AT : TAIL_AT + 8].cast("Q")[0] = 2**60
    pair.send(*[b"y"] * (CAPACITY // 32 - 1))
    with pytest.raises(PeerBroke, match="the launcher says it has read"):
        pair.send(b"z")
