"""The rank processes of one benchmark case: forked, with torch imported once, and all reaped.

Whatever they measure, they hand it over through memory or files that the caller has made.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from flodl_shm.errors import HostUnfit
from flodl_shm.proc.prctl import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.02


def run_ranks(ranks: int, body: Callable[[int], object], *, limit_s: float) -> None:
    """Run `body(rank)` in a process for each rank, to their ends.

    Raises HostUnfit when one fails or takes longer than the limit; the others are ended then.
    """
    pids: list[int] = []
    try:
        pids.extend(_fork(rank, body) for rank in range(ranks))
        failed = _await(pids, limit_s)
    except BaseException:
        _end(pids)
        raise
    if failed:
        raise HostUnfit(f"a benchmark case failed: {failed}")


def _fork(rank: int, body: Callable[[int], object]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        body(rank)
        code = 0
    except BaseException as exc:
        print(f"rank {rank}: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _await(pids: list[int], limit_s: float) -> str:
    """Reap all; the first failure or the deadline ends the others. Returns what went wrong."""
    deadline, order = time.monotonic() + limit_s, tuple(pids)
    while pids:
        for pid in tuple(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            pids.remove(pid)
            if status:
                _end(pids)
                return f"rank {order.index(pid)} ended with status {status}"
        if pids and time.monotonic() > deadline:
            _end(pids)
            return f"not done after {limit_s:g} s"
        time.sleep(LOOK_S)
    return ""


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while pids:
        os.waitpid(pids.pop(), 0)
