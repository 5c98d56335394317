"""The command line's front door: one group of commands, and how each ends.

click's own ending is not used: it turns Ctrl-C, and a reader that went away, into exit 1, and
usage errors into three lines.
Here every error is one sentence on stderr, with the exit code of its class, and a command that is
interrupted dies of the signal, so a shell loop stops too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import click

import flodl_shm
from flodl_shm.cli.commands import LATER_COMMANDS, clean, later_command
from flodl_shm.cli.replay import replay_command
from flodl_shm.cli.run import run
from flodl_shm.cli.selftest import selftest
from flodl_shm.cli.status import status
from flodl_shm.errors import BadConfig, FlodlError, HostUnfit, WeBroke

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

# Packages that setup.cfg asks for and that only some commands import.
NEEDED = ("torch", "numpy", "posix_ipc", "safetensors", "rich", "psutil")
NEEDS_THEM = "flodl_shm trains on Linux, with the packages that `pip install flodl-shm` brings"


@click.group(context_settings={"max_content_width": 100})
@click.version_option(flodl_shm.__version__, prog_name="flodl-shm", message="%(prog)s %(version)s")
def cli() -> None:
    """Train one model on unequal devices: each rank at its own speed, one consensus."""


cli.add_command(run)
cli.add_command(clean)
cli.add_command(replay_command)
cli.add_command(selftest)
cli.add_command(status)
for _name, _purpose in LATER_COMMANDS.items():
    cli.add_command(later_command(_name, _purpose))


def main(argv: Sequence[str] | None = None) -> int:
    """`flodl-shm COMMAND ...` and `python -m flodl_shm COMMAND ...`: the exit code."""
    return end_of(cli, argv, prog="flodl-shm")


def main_run(argv: Sequence[str] | None = None) -> int:
    """`python -m flodl_shm.run ...`: the exit code."""
    return end_of(run, argv, prog="python -m flodl_shm.run")


def end_of(command: click.Command, argv: Sequence[str] | None, *, prog: str) -> int:
    """Run one command and turn however it ends into an exit code and at most one sentence."""
    code = _code_of(command, argv, prog)
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)
    return code


def _let_go(stream: TextIO | None) -> None:
    """Flush; what a full disk does not take is dropped, or the interpreter's own flush at the
    end of the process would fail on it again and replace our exit code by 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # closed: nothing is left to flush
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _code_of(command: click.Command, argv: Sequence[str] | None, prog: str) -> int:
    try:
        code = _run(command, sys.argv[1:] if argv is None else argv, prog)
    except click.exceptions.NoArgsIsHelpError as usage:
        print(usage.format_message(), file=sys.stderr)
        return BadConfig.exit_code
    except click.ClickException as usage:
        return _refused(usage.format_message(), BadConfig.exit_code)
    except FlodlError as error:
        if isinstance(error, WeBroke):
            traceback.print_exc()
        return _refused(error.sentence(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _die_of(signal.SIGINT)
        return 128 + signal.SIGINT  # only where the signal is blocked
    except BrokenPipeError:  # `--help | head`: end as any program does whose reader went away
        _die_of(signal.SIGPIPE)
        return 128 + signal.SIGPIPE
    except ImportError as error:
        if error.name not in NEEDED:
            return _our_bug(error)
        sentence = f"{error.name} cannot be imported: {error}. {NEEDS_THEM}"
        return _refused(sentence, HostUnfit.exit_code)
    except Exception as error:
        return _our_bug(error)
    return code if isinstance(code, int) else 0


def _our_bug(error: Exception) -> int:
    traceback.print_exc()
    return _refused(f"this is our bug, please report it: {error!r}", FlodlError.exit_code)


def _run(command: click.Command, argv: Sequence[str], prog: str) -> object:
    """As click's own main does, which turns a reader that went away into exit 1 as well."""
    try:
        with command.make_context(prog, list(argv)) as context:
            return command.invoke(context)
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code


def _refused(sentence: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody reads it: there is the exit code
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _die_of(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
