"""What a dead rank leaves is killed; whoever removes the names that it left is let finish."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from flodl_shm.proc.leftovers import is_cleaner, kill_groups
from flodl_shm.proc.procfs import read_stat

pytestmark = pytest.mark.procs
CLEANED_S = 2.0  # nothing of a run may be there this long after its end


def entry_with_a_name(ticket, fds):
    """A rank that holds a named semaphore, as loaders with spawned workers do."""
    lock = get_context("spawn").Lock()
    print(f"/dev/shm/sem.{lock._semlock.name[1:]}", flush=True)
    signal.pause()


def until(holds) -> None:
    deadline = time.monotonic() + CLEANED_S
    while not holds():
        assert time.monotonic() < deadline, "not within 2 s"
        time.sleep(0.01)


def held_name(run) -> Path:
    path = Path(run.hear(b"\n").decode().strip())
    assert path.exists()
    return path


def test_names_of_a_killed_ranks_workers_go(rig):
    run = rig(entry_with_a_name)
    child = run.spawn(0)
    path = held_name(run)
    os.kill(child.pid, signal.SIGKILL)
    run.settle(child)
    until(lambda: not path.exists())


def test_names_go_when_the_server_ends_with_its_ranks(rig):
    run = rig(entry_with_a_name)
    run.spawn(0)
    path = held_name(run)
    run.server.close()
    until(lambda: not path.exists())


def test_all_of_a_group_but_its_cleaners(tmp_path):
    manager = tmp_path / "torch_shm_manager"
    manager.symlink_to(shutil.which("sleep"))
    command = f"{manager} 100 & echo $!; sleep 100 & echo $!; wait"
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    try:
        kept, other = (int(shell.stdout.readline()) for _ in range(2))
        until(lambda: is_cleaner(kept))  # it is a copy of the shell before it is itself
        assert not is_cleaner(shell.pid)
        kill_groups({shell.pid})
        assert shell.wait(5) == -signal.SIGKILL
        until(lambda: (stat := read_stat(other)) is None or stat.is_dead)
        assert not read_stat(kept).is_dead
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.stdout.close()


def test_a_server_leaves_cleaners_alone_at_its_end(rig, tmp_path):
    manager = tmp_path / "torch_shm_manager"
    manager.symlink_to(shutil.which("sleep"))

    def entry(ticket, fds):
        print(subprocess.Popen([manager, "100"], start_new_session=True).pid, flush=True)
        signal.pause()

    run = rig(entry)
    run.spawn(0)
    kept = int(run.hear(b"\n"))
    try:
        until(lambda: is_cleaner(kept))
        run.server.close()
        assert not read_stat(kept).is_dead
    finally:
        os.kill(kept, signal.SIGKILL)


def test_nobody_is_no_cleaner_and_neither_are_we():
    assert not is_cleaner(2**22 + 1)
    assert not is_cleaner(os.getpid())
    assert read_stat(os.getpid()).is_dead is False


def test_groups_that_are_gone_cost_nothing():
    kill_groups({2**22 + 1})
