"""Packets between launcher and fork server: bodies of any size, descriptors, nothing else."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from flodl_shm.errors import HostUnfit, PeerBroke, WeBroke
from flodl_shm.proc import parcel
from flodl_shm.proc.exit_status import ExitStatus
from flodl_shm.proc.fork_messages import Answer, Exit, Spawn

SPAWN = msgspec.msgpack.Decoder(Spawn)


@pytest.fixture
def ends():
    ours, theirs = parcel.pair()
    ours.setblocking(False)
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, parcel.INLINE_BYTES - 40, parcel.INLINE_BYTES, 3_000_000])
def test_a_body_of_any_size_arrives_with_its_descriptors(ends, size):
    before = len(os.listdir("/proc/self/fd"))
    message = Spawn(number=1, ticket=os.urandom(size), env={"A": None})
    parcel.send(ends[0], message, (0, 1))
    packet = parcel.receive(ends[1], SPAWN)
    assert packet is not None
    assert packet[0] == message
    assert len(packet[1]) == 2
    assert not any(os.get_inheritable(fd) for fd in packet[1])
    for fd in packet[1]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_and_nobody_are_told_apart(ends):
    with pytest.raises(BlockingIOError):
        parcel.receive(ends[1], SPAWN)
    ends[0].close()
    assert parcel.receive(ends[1], SPAWN) is None


@pytest.mark.parametrize("junk", [b"\0", b"\0junk", b"\1", b"\7", b"\0\x80"])
def test_junk_is_refused_and_its_descriptors_closed(ends, junk):
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ends[0], [junk], [] if junk == b"\1" else [0])
    with pytest.raises(PeerBroke, match="a packet between launcher and fork server"):
        parcel.receive(ends[1], SPAWN)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_travel_is_refused_before(ends):
    with pytest.raises(WeBroke, match="251 descriptors"):
        parcel.send(ends[0], Spawn(number=1, ticket=b"", env={}), [0] * 251)


def test_a_process_at_its_limit_of_descriptors_is_told(ends):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    parcel.send(ends[0], Spawn(number=1, ticket=b"", env={}), [0] * 20)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 5, hard))
    try:
        with pytest.raises(HostUnfit, match="may not open more files"):
            parcel.receive(ends[1], SPAWN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_answers_are_told_apart():
    answer = Exit(pid=3, status=ExitStatus(9, by_signal=True))
    body = msgspec.msgpack.encode(answer)
    assert msgspec.msgpack.decode(body, type=Answer) == answer
