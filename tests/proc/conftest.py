"""Real processes for the tests of the process room. Every wait is bounded and names its reason."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from flodl_shm.ids import Nanos, Rank, Row
from flodl_shm.proc.fork_server import ForkServer, SpawnRequest
from flodl_shm.proc.lifeline import Lifeline
from flodl_shm.proc.procfs import OomWatch
from flodl_shm.proc.supervisor import Child, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 10.0


def soon(seconds: float = LIMIT_S) -> Nanos:
    return Nanos(time.monotonic_ns() + int(seconds * 1e9))


def preload_nothing() -> None:
    pass


@dataclass
class Rig:
    """A fork server under a supervisor, and one pipe all ranks print into."""

    server: ForkServer
    supervisor: Supervisor
    lifeline: Lifeline
    read_fd: int
    write_fd: int
    heard: bytes = b""
    rows: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))

    def spawn(self, rank: int, ticket: bytes = b"", **more) -> Child:
        request = SpawnRequest(ticket=ticket, stdout=self.write_fd, stderr=self.write_fd, **more)
        row = Row(next(self.rows))
        return self.supervisor.spawn(Rank(rank), row, request, deadline=soon())

    def settle(self, *children: Child) -> None:
        """Wait until the ends of these are known."""
        until = soon()
        while not all(child.settled for child in children):
            assert time.monotonic_ns() < until, f"not settled: {children}"
            self.supervisor.collect(now=Nanos(time.monotonic_ns()))
            if not all(child.settled for child in children):
                readable(self.supervisor.poll_fds(), 0.1)

    def hear(self, wanted: bytes) -> bytes:
        """Read what ranks print until `wanted` is among it."""
        until = soon()
        while wanted not in self.heard:
            assert time.monotonic_ns() < until, f"heard only {self.heard!r}"
            if readable([self.read_fd], 0.1):
                self.heard += os.read(self.read_fd, 65536)
        return self.heard


def readable(fds: list[int], seconds: float) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(int(seconds * 1000))]


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(entry, preload=preload_nothing) -> Rig:
        lifeline = Lifeline()
        server = ForkServer.start(entry, preload=preload, lifeline=lifeline)
        supervisor = Supervisor(server, oom=OomWatch([]))
        made.append(Rig(server, supervisor, lifeline, *os.pipe()))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.close()
        one.server.close()
        one.lifeline.close()
        os.close(one.read_fd)
        os.close(one.write_fd)
