"""Ranks as fresh interpreters: `--start spawn`, and how a script under plain python starts its own.

    in the fork server's child   SpawnEntry: writes a kit, lets descriptors live on, becomes python
    python -c ... FD             main: reads the kit at FD, adopts the control block, is the rank

Session, PDEATHSIG, environment and standard streams were set up before and survive the exec, so
the child dies and is buried like any other. Nothing of the launcher's memory comes along.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

import flodl_shm
from flodl_shm.engine.rank_main import RankEntry
from flodl_shm.errors import WeBroke
from flodl_shm.proc.forked_child import run_to_status
from flodl_shm.shm.control_block import BlockKit, ControlBlock

if TYPE_CHECKING:
    from collections.abc import Sequence


# The package may be importable here only because a script has changed its sys.path.
BOOT = """import sys; {root!r} in sys.path or sys.path.append({root!r})
from flodl_shm.engine.spawned import main; main(sys.argv[1:])"""
ROOT = Path(flodl_shm.__file__).absolute().parents[1]


class Kit(msgspec.Struct, frozen=True):
    """What a rank is born with, descriptors by their numbers."""

    ticket: bytes
    block: BlockKit
    lifeline: int
    fds: tuple[int, ...]  # those of the entry: see RankEntry

    @property
    def all_fds(self) -> tuple[int, ...]:
        """Everything that must live through the exec, and through no other."""
        return (*self.block.fds, self.lifeline, *self.fds)


@dataclass(frozen=True, slots=True)
class SpawnEntry:
    """An entry of the fork server that turns the child into a fresh interpreter."""

    block: ControlBlock
    lifeline: int

    def __call__(self, ticket: bytes, fds: list[int]) -> NoReturn:
        """Does not return: the process goes on in `main` below."""
        kit = Kit(ticket=ticket, block=self.block.kit(), lifeline=self.lifeline, fds=tuple(fds))
        at = os.memfd_create("flodl-kit", 0)
        os.write(at, msgspec.msgpack.encode(kit))
        os.lseek(at, 0, os.SEEK_SET)
        for fd in kit.all_fds:
            os.set_inheritable(fd, True)
        boot = BOOT.format(root=str(ROOT))
        words = [sys.executable, *_interpreter_flags(), "-c", boot, str(at)]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, words)


def preload_nothing() -> None:
    """The server of such ranks has nothing they could share."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Be the rank whose kit lies behind the descriptor that is named."""
    kit = _read_kit(int(arguments[0]))
    for fd in kit.all_fds:
        os.set_inheritable(fd, False)  # what the script starts shall not hold the lifeline
    faulthandler.enable(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # as proc/forked_child.py has them, and why
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    entry = RankEntry(ControlBlock.adopt(kit.block), kit.lifeline)
    os._exit(run_to_status(lambda: entry(kit.ticket, list(kit.fds))))


def _read_kit(fd: int) -> Kit:
    try:
        with os.fdopen(fd, "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=Kit)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeBroke(f"a rank was born with an unreadable kit: {error}") from error


def _interpreter_flags() -> list[str]:
    """-X, -W, -O ... of this interpreter: the function multiprocessing uses for the same end."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags
