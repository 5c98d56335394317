"""bench-control: a typed message through ring and doorbell against a pickled dict.

Four placements of two processes; in each the channels take turns in a new random order every rep.
Figures are medians of the reps' medians, ratios are medians of the reps' ratios. `launcher_us` is
the round trip to a parent that waits in poll() for everything at once, as the launcher does;
`idle_cpu` is the share of a core that a process parked at its doorbell uses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_shm.bench.control_channels import (
    Channel,
    LauncherChannel,
    PipeChannel,
    QueueChannel,
    RingChannel,
)
from flodl_shm.bench.report import conclude
from flodl_shm.ids import Row
from flodl_shm.proc.prctl import die_with_parent
from flodl_shm.shm.control_block import ControlBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.context import ForkContext, ForkProcess

WARM_UP = 3  # reps that do not count
BURNERS = 2  # of the busy case


@dataclass(frozen=True, slots=True)
class Case:
    """Where parent and child run: indices into the usable cores, none for all of them."""

    name: str
    parent: tuple[int, ...] = ()
    child: tuple[int, ...] = ()
    burners: int = 0


CASES = (
    Case("pinned", parent=(0,), child=(1,)),
    Case("same_core", parent=(0,), child=(0,)),
    Case("unpinned"),
    Case("busy", burners=BURNERS),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    reps: int
    asks: int  # round trips of one channel in one rep
    messages: int  # one way, child to parent, of one channel in one rep
    idle_s: float


QUICK = Effort(reps=25, asks=100, messages=1500, idle_s=2.0)
FULL = Effort(reps=100, asks=200, messages=3000, idle_s=10.0)


@dataclass(frozen=True, slots=True)
class Rep:
    """One rep of one channel, in seconds: the median round trip, and all of the one-way run."""

    ask_s: float
    flow_s: float


def run_case(case: Case, effort: Effort, *, seed: int) -> dict[str, object]:
    """Measure one placement. The caller's own pinning is as before when it returns."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    channels: tuple[Channel, ...] = (
        RingChannel(),
        LauncherChannel(),
        PipeChannel(context),
        QueueChannel(context),
    )
    with ExitStack() as stack:
        for channel in channels:
            stack.callback(channel.close)
        stack.enter_context(_pinned([cores[at] for at in case.parent] or cores))
        theirs = [cores[at] for at in case.child] or cores
        for work in (*(channel.serve for channel in channels), *(case.burners * [_burn])):
            stack.enter_context(_child(context, work, theirs))
        reps = _measure(channels, effort, random.Random(seed))
        idle = _idle_cpu(context, effort.idle_s, theirs)
    return {**row_of(case.name, reps), "idle_cpu": idle}


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _child(
    context: ForkContext, work: Callable[[], None], cores: Sequence[int]
) -> Iterator[ForkProcess]:
    """A child at `work` until it returns or the block is left."""

    def live() -> None:
        die_with_parent(signal.SIGKILL)
        os.sched_setaffinity(0, cores)
        work()

    process = context.Process(target=live, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def _burn() -> None:
    while True:
        pass


def _measure(
    channels: Sequence[Channel], effort: Effort, draw: random.Random
) -> dict[str, list[Rep]]:
    reps: dict[str, list[Rep]] = {channel.name: [] for channel in channels}
    for rep in range(WARM_UP + effort.reps):
        for channel in draw.sample(channels, len(channels)):
            taken = Rep(_time_asks(channel, effort.asks), _time_flow(channel, effort.messages))
            if rep >= WARM_UP:
                reps[channel.name].append(taken)
    return reps


def _time_asks(channel: Channel, count: int) -> float:
    clock, ask, times = time.perf_counter_ns, channel.ask, []
    for _ in range(count):
        began = clock()
        ask()
        times.append(clock() - began)
    return statistics.median(times) / 1e9


def _time_flow(channel: Channel, count: int) -> float:
    began = time.perf_counter()
    channel.ask(count)
    return time.perf_counter() - began


def _idle_cpu(context: ForkContext, seconds: float, cores: Sequence[int]) -> float:
    """The processor time of a child that waits in vain, per second."""
    block = ControlBlock(1)
    told = context.SimpleQueue()

    def wait() -> None:
        bell, began, used = block.bells[0], time.monotonic_ns(), time.process_time_ns()
        bell.wait(lambda: block.beat(Row(0)).load() != 0, timeout_ns=int(seconds * 1e9))
        told.put((time.process_time_ns() - used) / (time.monotonic_ns() - began))

    try:
        with _child(context, wait, cores):
            share: float = told.get()
            return share
    finally:
        told.close()
        block.close()


def row_of(case: str, reps: dict[str, list[Rep]]) -> dict[str, object]:
    """Medians, and medians of the reps' ratios; all but idle_cpu."""
    ring = reps["ring"]

    def microseconds(name: str) -> float:
        return 1e6 * statistics.median(rep.ask_s for rep in reps[name])

    def times(name: str) -> float:
        pairs = zip(ring, reps[name], strict=True)
        return statistics.median(mine.ask_s / other.ask_s for mine, other in pairs)

    def speed_up(name: str) -> float:
        pairs = zip(ring, reps[name], strict=True)
        return statistics.median(other.flow_s / mine.flow_s for mine, other in pairs)

    return {
        "case": case,
        "ring_us": microseconds("ring"),
        "launcher_us": microseconds("launcher"),
        "pipe_us": microseconds("pipe"),
        "queue_us": microseconds("queue"),
        "x_pipe": times("pipe"),
        "x_queue": times("queue"),
        "msgs_x_pipe": speed_up("pipe"),
        "msgs_x_queue": speed_up("queue"),
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-control", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="fewer reps: well under a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the channels")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    return conclude(lambda: measure_all(effort, options.seed), options.json)


def measure_all(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """One row after the other; prints as it goes."""
    rows = []
    print("                 round trip, us                     ring /          messages, ring x")
    print(
        "case          ring launcher    pipe   queue     pipe   queue     pipe   queue   idle cpu"
    )
    for case in CASES:
        if case.child == (1,) and len(os.sched_getaffinity(0)) < 2:
            print(f"{case.name}: needs two cores, left out")
            continue
        row = run_case(case, effort, seed=seed)
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def line_of(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    return (
        "{case:10s} {ring_us:7.1f} {launcher_us:8.1f} {pipe_us:7.1f} {queue_us:7.1f} "
        "{x_pipe:8.2f} {x_queue:7.2f} {msgs_x_pipe:8.2f} {msgs_x_queue:7.2f} {idle_cpu:10.2%}"
    ).format(**row)


if __name__ == "__main__":
    sys.exit(main())
