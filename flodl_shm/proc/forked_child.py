"""A rank's process between the fork and its entry, and between its entry and its end.

The child starts as a copy of the fork server, which is a copy of the launcher. Here it becomes
what a fresh `python` would be: own session, default signals, own standard streams, own
environment, own random state, and none of the exit handlers that belong to its ancestors. What
the entry does is not known here.

Signals: all as in a fresh interpreter, so SIGINT raises KeyboardInterrupt. The terminal's Ctrl-C
does not reach a rank, since its session has no terminal; the launcher stops it in other ways.

Exit handlers: those registered in the rank by the user or a library run at its end, as do
threading's and multiprocessing's, so loader workers end in order; those inherited do not.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from flodl_shm.proc.prctl import die_with_parent, flush_c_stdio
from flodl_shm.proc.signals import die_of
from flodl_shm.proc.standard_streams import line_writer

Entry = Callable[[bytes, list[int]], None]  # ticket, descriptors


@dataclass(frozen=True, slots=True)
class Outfit:
    """What one child is given."""

    ticket: bytes
    fds: tuple[int, ...]
    stdout: int
    stderr: int
    env: Mapping[str, str | None]
    not_ours: tuple[int, ...]  # descriptors of the server that must not live on here


def fork() -> int:
    """os.fork without CPython's warning about threads: their number is counted and reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become_rank(entry: Entry, outfit: Outfit, *, server_pid: int) -> NoReturn:
    """Turn a child fresh from fork, all signals blocked, into a rank, run it, and end it."""
    status = 70
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server_pid:
            return  # type: ignore[misc]  # the server died before we armed: finally ends us
        reset_signals()
        forget_ancestors()
        _close(outfit.not_ours)
        _dress(outfit)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        status = run_to_status(lambda: entry(outfit.ticket, list(outfit.fds)))
    finally:
        os._exit(status)


def reset_signals() -> None:
    """Handlers as a fresh interpreter has them. The mask is the caller's."""
    signal.set_wakeup_fd(-1)
    faulthandler.disable()  # or enabling it again would not install its handlers again
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python's own start-up ignores these two; a write then fails with an exception instead.
        ignored = signum in {signal.SIGPIPE, signal.SIGXFSZ}
        signal.signal(signum, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_ancestors() -> None:
    """Drop the exit handlers and the random state inherited from launcher and server.

    Clearing atexit also drops those of the standard library, which must hold for what the rank
    itself will start: they are registered again, with nothing inherited in them.
    """
    atexit._clear()
    for inherited in list(getattr(weakref.finalize, "_registry", ())):
        inherited.atexit = False  # or the rank would remove the launcher's temporary directories
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None:
        util._finalizer_registry.clear()
        process._children = set()  # type: ignore[attr-defined]
        atexit.register(util._exit_function)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # random does so by itself; torch starts from a fixed seed anyway


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _dress(outfit: Outfit) -> None:
    """Standard streams and environment."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (outfit.stdout, 1), (outfit.stderr, 2)):
        os.dup2(source, target)
    # The received ones are numbered above 2: the server keeps 0 to 2 open.
    _close((null, outfit.stdout, outfit.stderr))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as we do
    sys.stdout, sys.stderr = line_writer(1), line_writer(2)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    faulthandler.enable(2)
    for variable, value in outfit.env.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def run_to_status(run: Callable[[], None]) -> int:
    """Run the entry as the interpreter runs a script, exit handlers included; the exit code."""
    status = 0
    try:
        run()
    except SystemExit as stop:
        status = _exit_code(stop)
    except KeyboardInterrupt:
        _show_exception()
        die_of(signal.SIGINT)
    except BaseException:
        _show_exception()
        status = 1
    if status == 0:
        # A failing rank does not wait for the user's threads: one may wait for it for ever.
        _attempt(getattr(threading, "_shutdown", lambda: None))
    _attempt(atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    flush_c_stdio()
    return status


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter makes of SystemExit: None is 0, a text goes to stderr and is 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    _attempt(lambda: print(stop.code, file=sys.stderr))
    return 1


def _attempt(act: Callable[[], object]) -> None:
    """The end must come, whatever a handler of the user raises; it is shown, not passed on."""
    try:
        act()
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()


def _show_exception() -> None:
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    try:
        sys.excepthook(kind, error, trace)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
