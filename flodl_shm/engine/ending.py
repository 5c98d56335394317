"""The last words of a run: its summary, the screen, and the first cause of a failure at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from flodl_shm.control.failure import FailureReport, root_cause
from flodl_shm.engine.shown_trace import without_ours
from flodl_shm.errors import FlodlError, WeBroke
from flodl_shm.ids import Nanos
from flodl_shm.obs.run_dir import as_json, write_json
from flodl_shm.obs.summary import summary
from flodl_shm.obs.words import clip

if TYPE_CHECKING:
    from flodl_shm.control.messages import End
    from flodl_shm.engine.host import Host
    from flodl_shm.engine.recorder import Recorder
    from flodl_shm.proc.error_file import ErrorReport

SHOWN_CHARS = 8000  # of a traceback: a deep one of a hundred lines


def report_end(host: Host, recorder: Recorder, end: End, *, last: bool = True) -> None:
    """Write the summary, show the end, and the first cause of a failure last of all.

    Of several runs of a script only the last is printed as an object.
    """
    told = summary(recorder.tally, now=Nanos(time.monotonic_ns()), resources=recorder.resources)
    targets = [host.record.summary]
    if host.config.summary is not None:
        targets.append(host.config.summary)
    for target in targets:
        try:
            write_json(target, told)
        except FlodlError as error:
            recorder.say(str(error))
    recorder.close()  # after the summary: a run without a writer and without one was killed
    recorder.progress.end(told, host.record.path)
    if host.config.as_json and last:
        print(as_json(told).decode(), flush=True)
    if end.exit_code:
        with contextlib.suppress(OSError):  # nobody reads it: there is the exit code
            _show_failure(host, end)


def _show_failure(host: Host, end: End) -> None:
    """The first cause, last on the screen: one sentence, or the traceback of the user's code."""
    cause = first_error(host.errors)
    if cause is None:
        for line in _last_words(host):
            print(line, file=sys.stderr)
        print(f"error: {_cut(' '.join(end.reason.split()))}", file=sys.stderr)
    elif cause.cause == "exit":
        print(f"error: {_exit_sentence(cause)}", file=sys.stderr)
    elif cause.cause == "refused" and end.exit_code != WeBroke.exit_code:
        print(f"error: {cause.message} (rank {cause.rank})", file=sys.stderr)
    else:
        device = host.config.devices[cause.rank]
        print(f"rank {cause.rank} ({device}) failed first", file=sys.stderr)
        print(f"  full report  {host.run_dir.error_file(cause.rank)}", file=sys.stderr)
        trace = without_ours(cause.traceback.rstrip())
        print(_cut(trace), file=sys.stderr)
        if len(trace) > SHOWN_CHARS:  # the end of a long message says neither what nor where
            print(f"{cause.kind}: {clip(cause.message)} ({cause.where()})", file=sys.stderr)


def _last_words(host: Host) -> list[str]:
    """Of a rank that failed and could not write why: what it has printed on stderr instead."""
    failed = [death for death in host.dead.values() if death.user_error]
    return list(host.members[failed[0].rank].last_words) if failed else []


def _exit_sentence(cause: ErrorReport) -> str:
    """Of a script that called sys.exit with a code other than 0, or with a text."""
    text = " ".join(cause.message.split())
    if text.lstrip("-").isdigit():
        text = f"the script ended with sys.exit({text})"
    where = f", {cause.where()}" if cause.file else ""
    return f"{_cut(text)} (rank {cause.rank}{where})"


def _cut(text: str) -> str:
    """What fits a screen: both ends of a long traceback or message matter."""
    if len(text) <= SHOWN_CHARS:
        return text
    left_out = len(text) - SHOWN_CHARS
    half = SHOWN_CHARS // 2
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"


def first_error(errors: list[ErrorReport]) -> ErrorReport | None:
    """The report of the rank that failed first, not of one that failed because of it."""
    first = root_cause(FailureReport(e.rank, e.kind, e.message, e.at) for e in errors)
    return next((e for e in errors if first and (e.rank, e.at) == (first.rank, first.at)), None)
