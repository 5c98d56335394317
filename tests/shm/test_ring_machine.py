"""Whatever is sent, read, spoiled or given up, the ring behaves like a list of messages."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flodl_shm.errors import PeerBroke, PeersLost
from flodl_shm.shm.frame import FRAME, BadFrame
from flodl_shm.shm.ring import DATA_AT, Reader, Ring, Writer

CAPACITY = 256
FAR_NS = 10**12
sizes = st.integers(0, 120) | st.integers(0, 4 * CAPACITY)


@dataclass
class Expected:
    """One entry of the model: a message, or None for one that will be reported as bad."""

    body: bytes | None
    at: int | None = None  # position of its frame, if it lies whole and unread in the ring


class RingMachine(RuleBasedStateMachine):
    """A bytearray stands in for shared memory: order between processes is tested elsewhere."""

    @initialize()
    def lay(self):
        self.memory = memoryview(bytearray(Ring.size_for(CAPACITY)))
        self.ring = Ring(self.memory, create=True)
        self.writer = Writer(self.ring, ring_bell=lambda: None, peer="reader")
        self.reader = Reader(self.ring, peer="writer")
        self.model: list[Expected] = []
        self.is_cut = False  # a message was given up half-way, which the next one reveals
        self.turn = 0

    def body(self, size: int) -> bytes:
        self.turn += 1
        return bytes((self.turn + i) % 256 for i in range(size))

    def expect_after_cut(self, entry: Expected) -> None:
        if self.is_cut:
            self.model.append(Expected(None))
            self.is_cut = False
        self.model.append(entry)

    def check_next(self) -> None:
        got = self.reader.read()
        if self.model:
            expected = self.model.pop(0)
            if expected.body is None:
                assert isinstance(got, BadFrame)
            else:
                assert got == expected.body
        else:
            assert got is None

    @rule(size=sizes)
    def send(self, size):
        body = self.body(size)
        whole = size <= self.ring.piece_bytes
        pending: list[bytes | BadFrame] = []

        def wait(ready, _timeout_ns):
            pending.extend(self.reader.read_all())
            return ready()

        self.writer.send(body, deadline_ns=time.monotonic_ns() + FAR_NS, wait=wait)
        span = FRAME.size + (size + 7) // 8 * 8
        self.expect_after_cut(Expected(body, self.ring.head.load() - span if whole else None))
        for got in pending:
            expected = self.model.pop(0)
            assert isinstance(got, BadFrame) if expected.body is None else got == expected.body

    @rule(size=sizes)
    def give_up_when_full(self, size):
        body = self.body(size)
        before = self.ring.head.load()
        try:
            self.writer.send(body, deadline_ns=0)
        except PeersLost:
            if self.ring.head.load() != before:
                if self.is_cut:
                    self.model.append(Expected(None))
                self.is_cut = True
        else:
            at = before if size <= self.ring.piece_bytes else None
            self.expect_after_cut(Expected(body, at))

    @rule()
    def read(self):
        self.check_next()

    @precondition(lambda self: any(entry.at is not None and entry.body for entry in self.model))
    @rule(data=st.data())
    def spoil_a_body(self, data):
        lying = [entry for entry in self.model if entry.at is not None and entry.body]
        entry = data.draw(st.sampled_from(lying))
        byte = data.draw(st.integers(0, len(entry.body) - 1))
        self.memory[DATA_AT + (entry.at + FRAME.size + byte) % CAPACITY] ^= 1
        entry.body = None

    @precondition(lambda self: self.reader.has_data())
    @rule(byte=st.integers(0, FRAME.size - 1))
    def scribble_the_next_header(self, byte):
        self.memory[DATA_AT + (self.ring.tail.load() + byte) % CAPACITY] ^= 1
        with pytest.raises(PeerBroke, match="writer"):
            self.reader.read()
        self.model.clear()
        self.is_cut = False

    @rule()
    def open_the_writer_again(self):
        self.writer = Writer(self.ring, ring_bell=lambda: None, peer="reader")

    @invariant()
    def cursors_hold(self):
        assert 0 <= self.ring.head.load() - self.ring.tail.load() <= self.ring.capacity

    def teardown(self):
        while self.model:
            self.check_next()
        assert self.reader.read() is None
        assert not self.reader.has_data()


RingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestRingMachine = RingMachine.TestCase
