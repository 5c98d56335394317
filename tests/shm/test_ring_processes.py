"""Rings and bells between real processes: nothing lost, nothing late, nothing out of order."""

from __future__ import annotations

import random
import signal
import time

import pytest

from flodl_shm.errors import PeersLost
from flodl_shm.shm import doorbell
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.ring import Reader, Ring, Writer
from flodl_shm.shm.segment import Segment

MS = 1_000_000
CELL_BYTES = 128


class Line:
    """One direction: a ring, the reader's bell, the writer's bell."""

    def __init__(self, view: memoryview, *, semaphores: bool) -> None:
        cells = view[:CELL_BYTES].cast("Q")
        self.ring = Ring(view[CELL_BYTES:], create=True)
        self.for_reader = Doorbell.create(cells, 0, semaphores=semaphores)
        self.for_writer = Doorbell.create(cells, 8, semaphores=semaphores)

    def writer(self, peer: str) -> Writer:
        return Writer(self.ring, ring_bell=self.for_reader.ring, peer=peer)

    def reader(self, peer: str) -> Reader:
        return Reader(self.ring, peer=peer, ring_bell=self.for_writer.ring)

    def await_room(self, ready, timeout_ns: int) -> bool:
        return self.for_writer.wait(ready, timeout_ns=timeout_ns)


@pytest.fixture(params=["semaphore", "eventfd"])
def lines(request):
    half = CELL_BYTES + Ring.size_for(2048)
    segment = Segment.create(2 * half, purpose="test")
    semaphores = request.param == "semaphore"
    yield [Line(segment.view[at : at + half], semaphores=semaphores) for at in (0, half)]
    segment.close()


def send_all(line: Line, bodies: list[bytes], peer: str) -> None:
    writer = line.writer(peer)
    for body in bodies:
        deadline_ns = time.monotonic_ns() + 10_000 * MS
        writer.send(body, deadline_ns=deadline_ns, wait=line.await_room)


def receive(line: Line, reader: Reader, count: int) -> tuple[list, int]:
    """Return `count` messages and the longest wait for one."""
    got: list = []
    longest = 0
    while len(got) < count:
        started = time.monotonic_ns()
        assert line.for_reader.wait(reader.has_data, timeout_ns=10_000 * MS)
        longest = max(longest, time.monotonic_ns() - started)
        got += reader.read_all()
    return got, longest


def messages(count: int, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    sizes = draw.choices([0, 8, 64, 200, 1500, 5000], [2, 20, 60, 10, 2, 1], k=count)
    return [draw.randbytes(size) for size in sizes]


def test_thousands_of_messages_both_ways_without_a_lost_wake_up(lines, children, monkeypatch):
    # A lost wake-up would cost one park: stretched to 5 s, so that it cannot pass for a machine
    # that was busy elsewhere.
    monkeypatch.setattr(doorbell, "PARK_NS", 5000 * MS)
    there, back = lines
    bodies = messages(3000, seed=1)

    def echo():
        reader, writer = there.reader("parent"), back.writer("parent")
        left = len(bodies)
        while left:
            for body in receive(there, reader, 1)[0]:
                deadline_ns = time.monotonic_ns() + 10_000 * MS
                writer.send(body, deadline_ns=deadline_ns, wait=back.await_room)
                left -= 1

    child = children.fork(echo)
    writer, reader = there.writer("child"), back.reader("child")
    longest = 0
    for body in bodies:
        writer.send(body, deadline_ns=time.monotonic_ns() + 10_000 * MS, wait=there.await_room)
        got, waited = receive(back, reader, 1)
        assert got == [body]
        longest = max(longest, waited)
    assert children.join(child) == 0
    assert longest < 2500 * MS


def test_lost_wake_ups_cost_a_park_each_and_no_message(lines, children):
    there, back = lines
    lost = [number % 20 == 7 for number in range(100)]

    def echo():
        reader = there.reader("parent")
        for _ in lost:
            send_all(back, receive(there, reader, 1)[0], "parent")

    child = children.fork(echo)
    reader = back.reader("child")
    waits = []
    for number, is_lost in enumerate(lost):
        time.sleep(0.002)  # the reader is asleep again
        ring = (lambda: None) if is_lost else there.for_reader.ring
        writer = Writer(there.ring, ring_bell=ring, peer="child")
        writer.send(bytes([number]), deadline_ns=time.monotonic_ns() + 10_000 * MS)
        got, waited = receive(back, reader, 1)
        assert got == [bytes([number])]
        waits.append(waited)
    assert children.join(child) == 0
    assert max(waits) < doorbell.PARK_NS + 500 * MS
    assert max(waits) > doorbell.PARK_NS / 2  # they were lost indeed


def test_a_stream_through_a_full_ring_stays_in_order(lines, children, monkeypatch):
    monkeypatch.setattr(doorbell, "PARK_NS", 5000 * MS)
    there, _ = lines
    bodies = messages(4000, seed=2)
    child = children.fork(lambda: send_all(there, bodies, "parent"))
    got, longest = receive(there, there.reader("child"), len(bodies))
    assert got == bodies
    assert longest < 2500 * MS
    assert children.join(child) == 0


def test_megabytes_go_through_a_small_ring_both_ways(lines, children):
    there, back = lines
    large = random.Random(3).randbytes(4_000_001)

    def echo():
        got, _ = receive(there, there.reader("parent"), 1)
        send_all(back, got, "parent")

    child = children.fork(echo)
    send_all(there, [large], "child")
    assert receive(back, back.reader("child"), 1)[0] == [large]
    assert children.join(child) == 0


def test_a_reader_that_stands_still_is_named(lines, children, ready_pipe):
    wait, tell = ready_pipe
    there, _ = lines

    def stand_still():
        tell()
        signal.pause()

    child = children.fork(stand_still)
    wait()
    writer = there.writer("rank 1")
    for _ in range(2048 // 128):
        writer.send(bytes(104), deadline_ns=0)
    deadline_ns = time.monotonic_ns() + 20 * MS
    with pytest.raises(PeersLost, match="for rank 1 to read"):
        writer.send(b"x", deadline_ns=deadline_ns, wait=there.await_room)
    assert time.monotonic_ns() >= deadline_ns
    assert children.kill(child) == -signal.SIGKILL


def test_what_a_killed_writer_had_published_is_whole(lines, children):
    there, _ = lines
    bodies = messages(4000, seed=4)
    child = children.fork(lambda: send_all(there, bodies * 100, "parent"))
    reader = there.reader("rank 2")
    got, _ = receive(there, reader, 500)
    assert children.kill(child) == -signal.SIGKILL
    got += reader.read_all()
    assert reader.read() is None
    expected = (bodies * 100)[: len(got)]
    assert got == expected
