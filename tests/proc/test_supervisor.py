"""Who lives, who is gone, and the words for it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank
from flodl_shm.proc.exit_status import ExitStatus
from flodl_shm.proc.procfs import OomWatch
from flodl_shm.proc.supervisor import is_stopped

SECOND = 1_000_000_000


def now():
    return Nanos(time.monotonic_ns())


def stay(ticket: bytes, fds: list[int]) -> None:
    if ticket == b"deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    if ticket != b"leave":
        while True:
            signal.pause()


def test_a_kill_of_ours_says_why_and_is_no_memory_trouble(rig, tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    run = rig(stay)
    run.supervisor._oom = OomWatch([counter])
    child = run.spawn(0)
    counter.write_text("oom_kill 1\n")
    assert run.supervisor.kill(Rank(0), "no progress for 300 s")
    run.settle(child)
    assert child.cause() == "signal 9 (SIGKILL), killed by the launcher: no progress for 300 s"
    assert not run.supervisor.kill(Rank(0), "again")
    assert not run.supervisor.kill(Rank(7), "never there")


def test_a_kernel_kill_for_memory_is_named(rig, tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 2\n")
    run = rig(stay)
    run.supervisor._oom = OomWatch([counter])
    child = run.spawn(0)
    counter.write_text("oom 1\noom_kill 3\n")
    os.kill(child.pid, signal.SIGKILL)
    run.settle(child)
    told = f"probably out of memory: oom_kill in {counter} went from 2 to 3"
    assert child.cause() == f"signal 9 (SIGKILL), {told}"


def test_a_plain_kill_claims_no_memory_trouble(rig, tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 2\n")
    run = rig(stay)
    run.supervisor._oom = OomWatch([counter])
    child = run.spawn(0)
    os.kill(child.pid, signal.SIGKILL)
    run.settle(child)
    assert child.cause() == "signal 9 (SIGKILL)"


def test_gone_comes_before_settled_and_each_once(rig):
    run = rig(stay)
    child = run.spawn(0, b"leave")
    gone, settled = [], []
    until = now() + 10 * SECOND
    while not settled:
        assert now() < until
        deaths = run.supervisor.collect(now=now())
        gone += deaths.gone
        settled += deaths.settled
    assert gone == settled == [child]
    assert child.cause() == "exit 0"
    assert run.supervisor.collect(now=now()).gone == []
    assert child.pidfd == -1


def test_a_status_that_never_comes_is_given_up_on(rig):
    run = rig(stay)
    child = run.spawn(0)
    os.kill(run.server.pid, signal.SIGSTOP)
    os.kill(child.pid, signal.SIGKILL)
    pidfd = os.pidfd_open(child.pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    until = now() + 10 * SECOND
    while child.is_alive:
        assert now() < until
        at = now()
        run.supervisor.collect(now=at)
    assert not child.settled
    late = Nanos(at + 3 * SECOND)
    assert run.supervisor.collect(now=late).settled == [child]
    assert child.cause() == "ended, status unknown"
    os.kill(run.server.pid, signal.SIGCONT)


def test_a_rank_comes_back_but_not_twice(rig):
    run = rig(stay)
    first = run.spawn(0)
    with pytest.raises(WeBroke, match=f"rank 0 is to be started twice: pid {first.pid} lives"):
        run.spawn(0)
    run.supervisor.kill(Rank(0), "test")
    run.settle(first)
    second = run.spawn(0)
    assert run.supervisor.children == {0: second}
    assert run.supervisor.living() == [second]
    assert second.row != first.row


def test_all_go_the_deaf_and_the_stopped_too(rig):
    run = rig(stay)
    plain, deaf, stopped = run.spawn(0), run.spawn(1, b"deaf"), run.spawn(2)
    while run.heard.count(b"up\n") < 3:
        run.heard += os.read(run.read_fd, 100)
    os.kill(stopped.pid, signal.SIGSTOP)
    until = now() + 10 * SECOND
    while not is_stopped(stopped):
        assert now() < until
    assert not is_stopped(plain)
    assert run.supervisor.terminate_all(grace_ns=SECOND // 5, why="the run is over") == []
    assert plain.cause() == stopped.cause() == "signal 15 (SIGTERM)"
    assert deaf.cause() == "signal 9 (SIGKILL), killed by the launcher: the run is over"
    assert not run.supervisor.send(Rank(0), signal.SIGTERM)
    assert not is_stopped(stopped)


def test_statuses_have_words():
    assert ExitStatus(7).words() == "exit 7"
    assert ExitStatus(7).code == 7
    assert ExitStatus(7).signum is None
    assert ExitStatus(6, by_signal=True).words() == "signal 6 (SIGABRT)"
    assert ExitStatus(45, by_signal=True).words() == "signal 45 (SIG45)"
    assert ExitStatus(45, by_signal=True).code is None


def test_a_living_child_says_so(rig):
    run = rig(stay)
    assert run.spawn(0).cause() == "alive"
