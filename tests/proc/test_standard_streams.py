"""Streams of forked processes."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading

import pytest

from flodl_shm.proc.standard_streams import WholeWriter, line_writer

pytestmark = pytest.mark.procs


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def ends_within(pid: int, seconds: float) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([pidfd], [], [], seconds)
        if not ready:
            os.kill(pid, 9)
        os.waitpid(pid, 0)
        return bool(ready)
    finally:
        os.close(pidfd)


def test_a_process_forked_while_a_thread_prints_can_print(pipe):
    """The thread stands in the midst of its write, since nobody reads, and so at the fork."""
    reader, writer = pipe
    stream = line_writer(writer)
    room = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    thread = threading.Thread(target=lambda: print("x" * 2 * room, file=stream))
    thread.start()
    poll = select.poll()
    poll.register(writer, select.POLLOUT)
    while poll.poll(0):
        os.sched_yield()
    pid = os.fork()
    if pid == 0:
        os.set_blocking(writer, False)  # not to wait for the reader: it is the lock that is tried
        try:
            print("child", file=stream)
        except BlockingIOError:
            os._exit(0)
        os._exit(1)
    assert ends_within(pid, 10.0)
    os.set_blocking(writer, True)
    got = 0
    while got < 2 * room + 1:
        got += len(os.read(reader, room))
    thread.join()


def test_a_write_larger_than_the_pipe_goes_out_whole(pipe):
    reader, writer = pipe
    data = bytes(range(256)) * 1024
    got = bytearray()

    def read():
        while len(got) < len(data):
            got.extend(os.read(reader, 65536))

    thread = threading.Thread(target=read)
    thread.start()
    assert WholeWriter(writer).write(data) == len(data)
    thread.join()
    assert got == data


def test_a_full_descriptor_that_does_not_block_is_an_error_with_the_count(pipe):
    _, writer = pipe
    os.set_blocking(writer, False)
    room = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    with pytest.raises(BlockingIOError) as caught:
        WholeWriter(writer).write(b"x" * (room + 1))
    assert caught.value.errno == errno.EAGAIN
    assert caught.value.characters_written == room


def test_what_is_printed_is_out_at_the_end_of_its_line_with_odd_characters_escaped(pipe):
    reader, writer = pipe
    stream = line_writer(writer)
    print("a", "b\udc80", file=stream)
    print("not yet", end="", file=stream)
    assert os.read(reader, 100) == b"a b\\udc80\n"
    stream.flush()
    assert os.read(reader, 100) == b"not yet"
