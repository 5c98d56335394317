"""What the launcher and its fork server say to each other, once."""

from __future__ import annotations

import msgspec

from flodl_shm.proc.exit_status import ExitStatus


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork one rank. Descriptors that travel along: stdout, stderr, then those of the entry."""

    number: int
    ticket: bytes
    env: dict[str, str | None]  # None removes the variable


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The preload is done; `error` holds its traceback if it failed, and the server ends."""

    pid: int
    threads: int  # 1 is what we want: a fork copies only the forking thread
    preload_ns: int
    error: str = ""


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Answers Spawn; one descriptor travels along, the child's pidfd."""

    number: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answers Spawn: the fork failed."""

    number: int
    why: str


class Exit(msgspec.Struct, frozen=True, tag=True):
    """A child has ended, what was left of its process group was killed, and it was reaped."""

    pid: int
    status: ExitStatus


Answer = Ready | Spawned | Refused | Exit
