"""The error file: what a failing rank leaves for the launcher to show.

Written by the rank right before it ends, atomically, whatever its exception does, or by the
launcher in the place of one that hangs; read by the launcher, which trusts nothing in it. The
first failure of a process stands: what fails afterwards is a consequence.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from flodl_shm.ids import Nanos, Rank, Row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

MESSAGE_CHARS: Final = 10_000
TRACE_CHARS: Final = 200_000  # a recursion error's traceback is shortened by Python itself
FILE_BYTES: Final = 16 * 1024 * 1024  # more than all limits here together

LINK: Final = "link"  # the cause class of a rank that cannot talk with the launcher: no failure

_OURS: Final = str(Path(__file__).resolve().parents[1])


class ErrorReport(msgspec.Struct, frozen=True):
    """One rank's failure. Texts are cut to the limits above."""

    rank: Rank
    row: Row
    pid: int
    cause: str  # the class of the failure, as the writer names it: "exception", "hang", ...
    at: Nanos  # monotonic, so the first failure of several ranks is known exactly
    kind: str = ""  # the exception's type, with its module unless that is builtins; or empty
    message: str = ""
    file: str = ""  # the innermost frame in code of the user; else the innermost frame
    line: int = 0
    traceback: str = ""  # chained and grouped exceptions included
    stacks: dict[str, str] = {}  # by thread, the writing one first
    recent: tuple[str, ...] = ()  # last messages, oldest first

    def where(self) -> str:
        """`train.py:12`, or an empty string."""
        return f"{self.file}:{self.line}" if self.file else ""

    def headline(self) -> str:
        """`KeyError: 'x' (train.py:12)`: the one line that must be seen."""
        first, *_ = self.message.strip().splitlines() or [""]
        head = f"{self.kind}: {first}" if first else self.kind
        place = f" ({self.where()})" if self.file else ""
        return (head or self.cause) + place


def write_error(
    path: Path,
    error: BaseException | None,
    *,
    rank: Rank,
    row: Row,
    cause: str,
    recent: Sequence[str] = (),
) -> str | None:
    """Write the report, unless this process has written one before.

    Never raises: a rank that cannot tell must still end. Returns why it could not be written.
    """
    try:
        first = read_error(path)
        if first is not None and first.pid == os.getpid() and first.row == row:
            return None
        _put(path, _describe(error, cause=cause, seat=(rank, row), recent=recent))
    except BaseException as trouble:
        return _safe_text(trouble) or type(trouble).__name__
    return None


def write_for(path: Path, report: ErrorReport) -> str | None:
    """Write a report of another process, unless that has written one itself.

    Never raises. Returns why it could not be written.
    """
    first = read_error(path)
    if first is not None and (first.pid, first.row) == (report.pid, report.row):
        return None
    try:
        _put(path, report)
    except OSError as trouble:
        return str(trouble)
    return None


def _put(path: Path, report: ErrorReport) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # the script may have tidied up
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(path)


def read_error(path: Path) -> ErrorReport | None:
    """The report; None when there is none or it is not one. Never raises."""
    try:
        with path.open("rb") as file:
            body = file.read(FILE_BYTES + 1)
        return msgspec.json.decode(body, type=ErrorReport) if len(body) <= FILE_BYTES else None
    except (OSError, ValueError, RecursionError):  # msgspec's own errors are ValueErrors
        return None


def _describe(
    error: BaseException | None,
    *,
    cause: str,
    seat: tuple[Rank, Row],
    recent: Sequence[str],
) -> ErrorReport:
    file, line = _place(error) if error is not None else ("", 0)
    return ErrorReport(
        rank=seat[0],
        row=seat[1],
        pid=os.getpid(),
        cause=cause,
        at=Nanos(time.monotonic_ns()),
        kind="" if error is None else _kind(error),
        message="" if error is None else _plain(_safe_text(error), MESSAGE_CHARS),
        file=_plain(file, MESSAGE_CHARS),
        line=line,
        traceback="" if error is None else _plain(_trace(error), TRACE_CHARS),
        stacks=all_stacks(),
        recent=tuple(_plain(text, MESSAGE_CHARS) for text in recent),
    )


def in_words(error: BaseException) -> tuple[str, str]:
    """One line, `KeyError: 'x' (train.py:12)`, and the traceback: for an error that ends nothing.

    The place is in code of the user. Never raises, whatever the exception does.
    """
    file, line = _place(error)
    message = _plain(_safe_text(error), MESSAGE_CHARS)
    said = ErrorReport(
        Rank(0), Row(0), 0, "", Nanos(0), _kind(error), message, _plain(file, MESSAGE_CHARS), line
    )
    return said.headline(), _plain(_trace(error), TRACE_CHARS)


def all_stacks() -> dict[str, str]:
    """The Python stack of every thread of this process, innermost call last; ours first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != here)
    stacks = {}
    for ident, frame in frames:
        name = f"{names.get(ident, 'unknown to Python')} ({ident})"
        stacks[_plain(name, 200)] = _plain(_stack(frame), TRACE_CHARS)
    return stacks


def _stack(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame))


def _kind(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as trouble:
        return f"<its __str__ raised {type(trouble).__name__}>"


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as trouble:
        # An exception with a broken __cause__, __notes__ or repr: the frames alone then.
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{_kind(error)}: {_safe_text(error)}\n<{type(trouble).__name__} in it>\n"


def _place(error: BaseException) -> tuple[str, int]:
    """File and line to look at: the innermost frame that is neither ours nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if line is not None
    ]
    users = [place for place in frames if is_users(place[0])]
    if users or frames:
        return (users or frames)[-1]
    if isinstance(error, BaseExceptionGroup):
        return _place(error.exceptions[0])
    return "", 0


def is_users(file: str) -> bool:
    """Whether the file is neither ours nor a library's."""
    if file.startswith("<"):  # frozen modules, exec'd text
        return False
    libraries = (_OURS, *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    return not any(Path(file).is_relative_to(library) for library in libraries)


def _plain(text: str, limit: int) -> str:
    """Cut in the middle, since both ends of a traceback matter; without lone surrogates."""
    text = str.__str__(text)  # exactly str: nothing else is encoded, and torch words a KeyError so
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n... (cut) ...\n{text[-limit // 2 :]}"
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    return text.encode("utf-8", "backslashreplace").decode()
