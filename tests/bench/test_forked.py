"""Rank processes of a benchmark: all reaped, a failure or a hang named, nobody left behind."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from flodl_shm.bench.forked import run_ranks
from flodl_shm.errors import HostUnfit

pytestmark = pytest.mark.procs


def test_every_rank_runs_once():
    told = mmap.mmap(-1, 8)
    run_ranks(3, lambda rank: told.__setitem__(rank, 1 + rank), limit_s=20)
    assert told[:4] == b"\x01\x02\x03\x00"


def test_the_first_failure_ends_the_others(capfd):
    pids = memoryview(mmap.mmap(-1, 16)).cast("Q")

    def body(rank):
        pids[rank] = os.getpid()
        if rank == 1:
            while not pids[0]:
                time.sleep(0.001)
            raise ValueError("no")
        time.sleep(60)

    with pytest.raises(HostUnfit, match="rank 1 ended with status 256"):
        run_ranks(2, body, limit_s=20)
    assert "rank 1: ValueError: no" in capfd.readouterr().err
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_hang_is_ended():
    with pytest.raises(HostUnfit, match=r"not done after 0\.05 s"):
        run_ranks(2, lambda rank: time.sleep(60), limit_s=0.05)
