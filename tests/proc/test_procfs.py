"""Facts about processes, and counters that tell a kill for memory from any other."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from flodl_shm.proc.procfs import (
    OomWatch,
    children_of,
    oom_counters,
    own_threads,
    read_memory,
    read_oom_kills,
    read_stat,
    read_usage,
)


def test_our_own_facts():
    stat = read_stat(os.getpid())
    assert stat is not None
    assert stat.state in "RS"
    assert (stat.parent, stat.group, stat.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert stat.threads == own_threads()
    memory = read_memory(os.getpid())
    assert memory is not None
    assert memory.rss >= memory.pss >= memory.private > 1


def test_what_a_process_has_used():
    usage = read_usage(os.getpid())
    assert usage is not None
    assert usage.is_healthy
    assert usage.threads == own_threads()
    assert usage.cpu_s == pytest.approx(sum(os.times()[:2]), abs=0.05)
    memory = read_memory(os.getpid())
    assert memory is not None
    assert usage.rss_mib == pytest.approx(memory.rss, rel=0.05)


def test_a_name_with_parentheses_confuses_nobody(tmp_path):
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "20"])
    try:
        stat = read_stat(child.pid)
        assert stat is not None
        assert stat.parent == os.getpid()
        assert child.pid in children_of(os.getpid())
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = read_stat(child.pid)
        assert stopped is not None
        assert stopped.is_stopped
        usage = read_usage(child.pid)
        assert usage is not None
        assert not usage.is_healthy
    finally:
        child.kill()
        child.wait(10)
    assert read_stat(child.pid) is None
    assert read_usage(child.pid) is None
    assert read_memory(child.pid) is None


def test_a_zombie_has_a_state_and_no_memory():
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = read_stat(child.pid)
    assert stat is not None
    assert stat.state == "Z"
    assert read_usage(child.pid) is None
    assert read_memory(child.pid) is None
    assert child.wait(10) == 0


def test_counters_of_both_cgroup_versions_are_found(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:cpu,memory:/box/a\n1:cpuset:/\n0::/box/b\n")
    (proc / "vmstat").write_text("nr_free 7\noom_kill 9\n")
    (root / "box/b").mkdir(parents=True)
    (root / "memory").mkdir()
    (root / "box/b/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (root / "memory/memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    found = oom_counters(root, proc)
    assert found == [
        root / "memory/memory.oom_control",
        root / "box/b/memory.events",
        proc / "vmstat",
    ]
    assert [read_oom_kills(path) for path in found] == [1, 2, 9]


def test_a_watch_tells_a_rise_once(tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    watch = OomWatch([counter])
    assert watch.look() == ""
    counter.write_text("oom_kill 6\n")
    assert watch.look() == f"oom_kill in {counter} went from 4 to 6"
    assert watch.look() == ""
    counter.write_text("oom_kill what\n")
    assert watch.look() == ""
    counter.unlink()
    assert watch.look() == ""


def test_this_machine_can_be_asked():
    assert OomWatch().look() == ""
