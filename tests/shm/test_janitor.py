"""Orphans go, live segments stay, names are short, the lock is one per uid and leaves nothing."""

from __future__ import annotations

import codecs
import fcntl
import os
import signal
from pathlib import Path

import pytest

from flodl_shm.errors import HostUnfit
from flodl_shm.shm import janitor
from flodl_shm.shm.janitor import fresh_name, sweep, uid_lock
from flodl_shm.shm.segment import Segment

UID = os.getuid()


def test_the_longest_name_fits_in_30_characters(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    name = fresh_name()
    assert name.startswith("/flodl-4294967294-")
    assert len(name) <= 30


def test_names_differ_and_carry_the_uid():
    names = {fresh_name() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(f"/flodl-{UID}-") for name in names)


def test_orphans_of_both_kinds_are_removed_and_named(tmp_path):
    orphans = [f"flodl-{UID}-0000000a", f"sem.flodl-{UID}-0000000b"]
    for name in orphans:
        (tmp_path / name).write_bytes(b"left by a killed run")
    assert sweep(tmp_path) == orphans
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_touched(tmp_path):
    others = [
        f"flodl-{UID + 1}-0000000a",
        f"flodl-{UID}-0000000a.txt",
        f"flodl-{UID}-XYZ",
        f"xflodl-{UID}-0000000a",
        "sem.other",
    ]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / f"flodl-{UID}-0000000d").mkdir()
    (tmp_path / f"flodl-{UID}-0000000e").symlink_to(tmp_path / "sem.other")
    os.mkfifo(tmp_path / f"flodl-{UID}-0000000f")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert sweep(tmp_path) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_two_users_neither_meet_nor_open_what_the_other_left(tmp_path, children):
    tmp_path.chmod(0o1777)  # as /dev/shm
    other = 65534
    mine = tmp_path / f"flodl-{UID}-0000000a"
    mine.touch(mode=0o600)
    theirs = tmp_path / f"flodl-{other}-0000000a"
    theirs.touch(mode=0o600)
    os.chown(theirs, other, other)
    codecs.lookup("ascii")  # python's own library may be closed to others, too

    def be_the_other():
        os.chdir(tmp_path)  # the way to it is closed to others
        os.setgid(other)
        os.setuid(other)
        here = Path()
        with pytest.raises(PermissionError):
            (here / mine.name).open()
        assert fresh_name().startswith(f"/flodl-{other}-")
        assert sweep(here, patience_s=0.0) == [theirs.name]
        Segment.create(4096, purpose="test").close()

    with uid_lock(tmp_path):  # of ours: nobody else waits for it
        child = children.fork(be_the_other)
        assert children.join(child) == 0
    assert mine.exists()
    assert not theirs.exists()


def test_a_live_segment_stays_until_its_holder_is_killed(tmp_path, children, ready_pipe):
    wait, tell = ready_pipe
    names = [f"flodl-{UID}-0000000{digit}" for digit in "123"]

    def hold(name):
        fd = os.open(tmp_path / name, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        tell()
        signal.pause()

    holders = [children.fork(lambda name=name: hold(name)) for name in names]
    for _ in holders:
        wait()
    orphan = tmp_path / f"flodl-{UID}-0000000f"
    orphan.touch()
    assert sweep(tmp_path) == [orphan.name]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert children.kill(holders[1]) == -signal.SIGKILL
    assert sweep(tmp_path) == [names[1]]
    for holder in (holders[0], holders[2]):
        children.kill(holder)
    assert sweep(tmp_path) == [names[0], names[2]]


def test_a_holder_killed_between_create_and_unlink_is_cleaned_up(children, monkeypatch):
    monkeypatch.setattr(janitor.os, "urandom", lambda _: b"\xde\xad" + os.getpid().to_bytes(4)[2:])

    def die_inside():
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with monkeypatch.context() as lockless:
            # The uid lock itself is taken by flock: let it pass, die at the segment's.
            lockless.setattr(janitor, "try_flock", lambda _: True)
            Segment.create(4096, purpose="test")

    victim = children.fork(die_inside)
    assert children.join(victim) == -signal.SIGKILL
    name = f"flodl-{UID}-dead{victim.to_bytes(4)[2:].hex()}"
    sweep()
    assert not (janitor.SHM / name).exists()


def test_a_place_that_cannot_be_swept_holds_nothing_of_ours(tmp_path):
    assert sweep(tmp_path / "missing") == []


def test_the_lock_leaves_no_file_and_can_be_taken_again(tmp_path):
    for _ in range(3):
        with uid_lock(tmp_path):
            assert (tmp_path / f"flodl-{UID}.lock").exists()
        assert list(tmp_path.iterdir()) == []


def test_an_error_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(KeyError), uid_lock(tmp_path):
        raise KeyError
    with uid_lock(tmp_path, patience_s=0):
        pass


def test_a_held_lock_is_waited_for_and_named(tmp_path, children, ready_pipe):
    wait, tell = ready_pipe

    def hold():
        with uid_lock(tmp_path):
            tell()
            signal.pause()

    holder = children.fork(hold)
    wait()
    named = rf"waited 0.02 s for the lock .*flodl-{UID}.lock"
    with pytest.raises(HostUnfit, match=named), uid_lock(tmp_path, patience_s=0.02):
        pass
    children.kill(holder)
    with uid_lock(tmp_path, patience_s=0):  # the kernel gave the dead holder's lock back
        pass


def test_a_child_forked_inside_does_not_keep_it(tmp_path, children, ready_pipe):
    wait, tell = ready_pipe

    def outlive():
        tell()
        signal.pause()

    with uid_lock(tmp_path):
        child = children.fork(outlive)
        wait()
    with uid_lock(tmp_path, patience_s=0):
        pass
    children.kill(child)


def test_many_processes_never_hold_it_together(tmp_path, children):
    inside = tmp_path / "inside"

    def work():
        for _ in range(40):
            with uid_lock(tmp_path):
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                inside.unlink()

    born = [children.fork(work) for _ in range(3)]
    assert [children.join(pid) for pid in born] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []
