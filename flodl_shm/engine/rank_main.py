"""What a process does from the moment it is a rank: set the stage and run the user's script.

Runs in a child of the fork server, which sees to the process's end. The script runs as
`__main__`, as under `python script.py`; whatever it raises is written to the rank's error file
before it goes on its way to stderr and to the exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flodl_shm.engine import ticket as tickets
from flodl_shm.engine.loader_death import note_dead_workers
from flodl_shm.engine.script import as_the_script_sees_it, run_module, run_script
from flodl_shm.errors import FlodlError, LinkLost
from flodl_shm.proc import failpoints, stacks
from flodl_shm.proc.error_file import LINK, write_error

if TYPE_CHECKING:
    from flodl_shm.engine.rank_session import ShmSession
    from flodl_shm.engine.ticket import Ticket
    from flodl_shm.shm.control_block import ControlBlock

LAST_S = 5.0  # of a failed rank's exit handlers; the others wait for the news that long


def preload() -> None:
    """Import once, in the fork server, what every rank needs."""
    import torch

    import flodl_shm.engine.rank_session
    import flodl_shm.train.trainer  # noqa: F401

    torch.set_num_threads(1)  # no pool before the fork; ranks set their own number
    # The first optimizer of a process imports torch._dynamo, a second of work for every rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


@dataclass(frozen=True, slots=True)
class RankEntry:
    """Called in the child with its ticket and the descriptors that came with it."""

    block: ControlBlock
    lifeline: int

    def __call__(self, body: bytes, fds: list[int]) -> None:
        """Be the rank of this ticket until its script ends."""
        ticket = tickets.decode(body)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher is told, and says when to stop
        from flodl_shm.engine.rank_session import Bridge, ShmSession

        session = ShmSession(ticket, self.block, socket.socket(fileno=fds[0]))
        try:
            stacks.register(Path(ticket.stacks_file))  # without them it can be killed all the same
            failpoints.arm(os.environ, rank=ticket.rank)
            Bridge(self.block, ticket.row, self.lifeline).start()
            if failpoints.ARMED:
                failpoints.hit("start")
            _be(ticket, session)
            if failpoints.ARMED:
                failpoints.hit("exit")
        except SystemExit as stop:
            if stop.code in (None, 0):
                raise
            # The text of sys.exit("text") is not printed here: see below.
            _report(ticket, session, stop, cause="exit")
            _fail(stop.code if isinstance(stop.code, int) else 1)
        except BaseException as error:
            # Not by way of stderr: the launcher shows the first cause last on the screen, and
            # what this rank says of it would stand there twice.
            _report(ticket, session, error, cause=_cause_of(error))
            _fail(error.exit_code if isinstance(error, FlodlError) else 1)


def _cause_of(error: BaseException) -> str:
    if isinstance(error, LinkLost):
        return LINK
    return "refused" if isinstance(error, FlodlError) else "exception"


def _be(ticket: Ticket, session: ShmSession) -> None:
    import torch

    from flodl_shm.train import session as sessions
    from flodl_shm.train.handle import join_all
    from flodl_shm.train.turnstile import Turnstile

    torch.set_num_threads(ticket.threads)
    sessions.CURRENT = Turnstile(session)
    if ticket.earlier is not None:
        from flodl_shm.engine.self_launch import OneRun

        sessions.ONE_RUN = OneRun(ticket, session.is_lowest)
    os.chdir(ticket.cwd)
    if ticket.script is not None:
        run_script(ticket.script, ticket.script_args)
    elif ticket.module is not None:
        run_module(ticket.module, ticket.script_args)
    else:
        _run_workload(ticket)
    join_all()


def _run_workload(ticket: Ticket) -> None:
    from flodl_shm.train.trainer import Trainer
    from flodl_shm.workloads import build

    Trainer(**build(ticket.workload or "", **ticket.workload_options)).run()


def _fail(code: int) -> NoReturn:
    """End with `code`, soon: an exit handler may wait for ever for a process of the script."""
    last = threading.Timer(LAST_S, os._exit, (code & 0xFF,))
    last.daemon = True
    with contextlib.suppress(RuntimeError):  # no more threads: it may be just that which failed
        last.start()
    raise SystemExit(code) from None


def _report(ticket: Ticket, session: ShmSession, error: BaseException, *, cause: str) -> None:
    """Write error file and log. Where neither can be written, stderr tells it."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    if ticket.workload is None and main is not None:
        error = as_the_script_sees_it(error, main)
    note_dead_workers(error)
    why = write_error(
        Path(ticket.error_file),
        error,
        rank=ticket.rank,
        row=ticket.row,
        cause=cause,
        recent=list(session.link.recent),
    )
    try:
        with Path(ticket.stderr_log).open("a", encoding="utf-8", errors="backslashreplace") as log:
            traceback.print_exception(error, file=log)
    except OSError as trouble:
        why = why or str(trouble)
    if why is not None:
        print(f"the error file could not be written: {why}", file=sys.stderr)
        traceback.print_exception(error)
