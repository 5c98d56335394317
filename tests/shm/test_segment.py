"""Segments are reserved, private, nameless, and a refusal says the numbers."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat

import posix_ipc
import pytest

from flodl_shm.errors import HostUnfit, PeerBroke, WeBroke
from flodl_shm.shm import janitor
from flodl_shm.shm import segment as module
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.free_memory import FreeMemory
from flodl_shm.shm.janitor import SHM, uid_lock
from flodl_shm.shm.segment import SPARE_BYTES, Segment

SIZE = 3 * 4096
PLENTY = 1 << 40


def room(shm: int = PLENTY, memory: int = PLENTY):
    return lambda: FreeMemory(shm=shm, memory=memory)


def our_names() -> list[str]:
    """Names that outlive the lock: under it nobody is between create and unlink."""
    with uid_lock():
        return [
            name
            for name in os.listdir(SHM)
            if name.startswith((f"flodl-{os.getuid()}-", f"sem.flodl-{os.getuid()}-"))
        ]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def segment():
    made = Segment.create(SIZE, purpose="test", free=room())
    yield made
    made.close()


def test_it_is_zeroed_reserved_private_and_nameless(segment):
    facts = os.fstat(segment.fd)
    assert segment.kind == "shm"
    assert bytes(segment.view) == bytes(SIZE)
    assert facts.st_blocks * 512 >= SIZE
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_nlink == 0
    assert our_names() == []


def test_its_owner_holds_the_lock_on_the_file_itself(segment):
    other = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


def test_a_child_shares_it_through_fork(segment, children):
    def write():
        segment.view[SIZE - 1] = 7

    assert children.join(children.fork(write)) == 0
    assert segment.view[SIZE - 1] == 7


@pytest.mark.parametrize("kind", ["shm", "memfd"])
def test_a_passed_descriptor_maps_the_same_memory(kind):
    free = room(shm=PLENTY if kind == "shm" else 0)
    segment = Segment.create(SIZE, purpose="test", free=free)
    adopted = Segment.adopt(os.dup(segment.fd), SIZE)
    segment.view[5] = 9
    assert adopted.view[5] == 9
    assert adopted.kind == segment.kind == kind
    adopted.close()
    segment.close()


def test_a_smaller_descriptor_than_announced_is_refused_and_closed(segment):
    before = open_descriptors()
    with pytest.raises(PeerBroke, match=f"holds {SIZE} bytes, {SIZE + 1} were announced"):
        Segment.adopt(os.dup(segment.fd), SIZE + 1)
    assert open_descriptors() == before


def test_a_killed_holder_leaves_nothing(children, ready_pipe):
    wait, tell = ready_pipe

    def hold():
        made = Segment.create(SIZE, purpose="test")
        bell = Doorbell.create(made.view.cast("Q"), 0)
        tell()
        bell.wait(lambda: False)

    holder = children.fork(hold)
    wait()
    assert children.kill(holder) == -signal.SIGKILL
    assert our_names() == []


@pytest.mark.parametrize("shm", [0, SIZE, SIZE + SPARE_BYTES - 1])
def test_a_small_mount_is_left_to_others_and_a_sealed_memfd_taken(shm):
    segment = Segment.create(SIZE, purpose="arena", free=room(shm=shm))
    assert segment.kind == "memfd"
    assert os.fstat(segment.fd).st_blocks * 512 >= SIZE
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close()


def test_without_memfd_a_tight_mount_will_do(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no memfd here")

    monkeypatch.setattr(module, "_open_memfd", refuse)
    segment = Segment.create(SIZE, purpose="test", free=room(shm=SIZE))
    assert segment.kind == "shm"
    segment.close()


def test_too_small_everywhere_names_bytes_and_the_way_out(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("reserved before the check"))
    before = open_descriptors()
    with pytest.raises(HostUnfit) as refusal:
        Segment.create(SIZE, purpose="arena", free=room(shm=4096, memory=8192))
    sentence = refusal.value.sentence()
    for words in (
        "for the arena",
        f"{SIZE} bytes wanted",
        "4096 bytes free in /dev/shm",
        "8192 bytes of memory available (bounded by the host)",
        "--shm-size",
        "memory limit",
    ):
        assert words in sentence
    assert refusal.value.exit_code == 3
    assert open_descriptors() == before


def test_without_fallback_the_mount_alone_counts():
    with pytest.raises(HostUnfit, match="4096 bytes free in /dev/shm"):
        Segment.create(SIZE, purpose="test", fallback=False, free=room(shm=4096))
    segment = Segment.create(SIZE, purpose="test", fallback=False, free=room(shm=SIZE))
    assert segment.kind == "shm"
    segment.close()


def test_enospc_while_reserving_falls_back_and_leaves_nothing(monkeypatch):
    real = os.posix_fallocate
    calls = []

    def full_at_first(fd, start, count):
        calls.append(count)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, start, count)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    before = open_descriptors()
    segment = Segment.create(SIZE, purpose="test", free=room())
    assert (segment.kind, calls) == ("memfd", [SIZE, SIZE])
    segment.close()
    assert open_descriptors() == before


def test_enospc_everywhere_is_a_refusal_that_says_so(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_descriptors()
    with pytest.raises(HostUnfit, match="No space left on device"):
        Segment.create(SIZE, purpose="test", free=room())
    assert open_descriptors() == before
    assert our_names() == []


def test_it_is_sized_once_and_reserved_in_pieces(monkeypatch):
    sized, reserved = [], []
    monkeypatch.setattr(module, "RESERVE_PIECE", 4096)
    real_size, real_reserve = os.ftruncate, os.posix_fallocate
    monkeypatch.setattr(os, "ftruncate", lambda fd, n: (sized.append(n), real_size(fd, n)))
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, a, n: (reserved.append((a, n)), real_reserve(fd, a, n))
    )
    Segment.create(10_000, purpose="test", free=room()).close()
    assert sized == [10_000]
    assert reserved == [(0, 4096), (4096, 4096), (8192, 1808)]


def test_an_existing_name_is_never_opened(monkeypatch):
    drawn = []

    def draw():
        drawn.append(f"/flodl-{os.getuid()}-5eed{os.getpid() % 2**16:04x}")
        return drawn[-1] if len(drawn) < 3 else drawn[-1][:-8] + "f" + drawn[-1][-7:]

    leftover = SHM / draw()[1:]
    try:
        with uid_lock():  # no sweep of another run may take it away meanwhile
            leftover.write_bytes(b"garbage of a dead run")
            monkeypatch.setattr(janitor, "fresh_name", draw)
            memory = janitor.create_exclusive(
                lambda name: posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
            )
            memory.unlink()
            memory.close_fd()
            assert len(drawn) == 3
            assert leftover.read_bytes() == b"garbage of a dead run"
    finally:
        leftover.unlink(missing_ok=True)


def test_names_that_never_come_free_are_a_refusal(monkeypatch):
    class Taken:
        def __new__(cls, *_, **__):
            raise module.posix_ipc.ExistentialError

    monkeypatch.setattr(module.posix_ipc, "SharedMemory", Taken)
    with pytest.raises(HostUnfit, match="16 random names in a row exist already"):
        Segment.create(SIZE, purpose="test", fallback=False, free=room())


def test_prefault_changes_no_byte(segment):
    segment.view[4096] = 200
    segment.prefault()
    assert segment.view[4096] == 200


def test_prefault_on_an_old_kernel_only_reads(segment, monkeypatch):
    monkeypatch.setattr(module, "MADV_POPULATE_WRITE", 9999)
    segment.view[0] = 3
    segment.prefault()
    assert segment.view[0] == 3


def test_closing_with_a_view_alive_hides_no_error(segment):
    view = segment.view.cast("Q")

    def fails():
        try:
            raise ValueError("the user's own")
        finally:
            segment.close()

    with pytest.raises(ValueError, match="the user's own"):
        fails()
    view[0] = 1  # still mapped
    assert view[0] == 1
    segment.close()


def test_closing_gives_mapping_and_descriptor_back():
    before = open_descriptors()
    segment = Segment.create(SIZE, purpose="test", free=room())
    segment.close()
    assert open_descriptors() == before
    with pytest.raises(ValueError, match="released"):
        segment.view[0]


def test_an_empty_segment_is_our_bug():
    with pytest.raises(WeBroke, match="a segment of 0 bytes"):
        Segment.create(0, purpose="test")
