"""What a rank prints: whole lines for the screen, every byte for its log files.

Reads both pipes of a rank without ever blocking, so a rank is never held up by the launcher, and
never holds it up. Shows lines only; where they go is for the terminal to decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from flodl_shm.proc.lifeline import close_in_launcher, keep_in_launcher

if TYPE_CHECKING:
    from pathlib import Path

LINE_BYTES: Final = 8192  # what of one line is shown; a screen has no use for more
READ_BYTES: Final = 64 * 1024  # a pipe's default capacity
TURN_BYTES: Final = 1024 * 1024  # per pipe and call, so one loud rank cannot starve the loop
PIPE_BYTES: Final = 256 * 1024  # a burst of this size does not wait for the launcher

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Line:
    """`update`: it ended in a carriage return, as a progress bar does, so the next replaces it."""

    text: str
    update: bool = False


class LineSplitter:
    """Bytes in, lines out. Holds at most `limit` bytes and a carriage return.

    A line longer than `limit` is shown once, cut, as soon as that is known; the rest of it is
    dropped. Of the updates in one feed only the last is passed on.
    """

    def __init__(self, *, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._held = b""  # of the line not yet ended
        self._shown = 0  # bytes seen of a line that was cut; 0: it is not

    def feed(self, data: bytes) -> list[Line]:
        """Lines completed by `data`, and at the end the last update, if any came after them."""
        lines: list[Line] = []
        *whole, rest = data.split(b"\n")
        for part in whole:
            lines += self._end_line(part)
        update = self._hold(rest)
        return lines + update

    def flush(self) -> list[Line]:
        """What is held, at the end of the stream."""
        return self._end_line(b"") if self._held and not self._shown else []

    def _end_line(self, part: bytes) -> list[Line]:
        if self._shown:  # its beginning was shown already
            self._shown = 0
            _, again, part = part.removesuffix(b"\r").partition(b"\r")
            if not again:
                return []
        line = (self._held + part).removesuffix(b"\r")
        self._held = b""
        # After a carriage return the text before it is overwritten on a screen.
        line = line.rpartition(b"\r")[2]
        return [Line(self._cut(line) if len(line) > self._limit else _show(line))]

    def _hold(self, rest: bytes) -> list[Line]:
        """Keep the beginning of a line; an update or a cut line may be due already."""
        if self._shown:
            if b"\r" not in rest[:-1]:  # at the very end it may be half of a line end
                return []
            self._shown = 0
            rest = rest.partition(b"\r")[2]
        held = self._held + rest
        # A carriage return at the very end may be the first half of a line end.
        before, _, after = held[:-1].rpartition(b"\r")
        self._held = after + held[-1:]
        if len(self._held) > self._limit:
            cut = self._cut(self._held)
            self._shown = len(self._held)
            self._held = b""
            return [Line(cut)]
        update = before.rpartition(b"\r")[2]
        return [Line(_show(update[: self._limit]), update=True)] if update else []

    def _cut(self, line: bytes) -> str:
        end = self._limit
        while end > self._limit - 4 and line[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        return _show(line[:end]) + " ... (cut: the rest of this line is in the rank's log)"


def _show(line: bytes) -> str:
    """Text for a terminal: what is no UTF-8 and NULs are spelled out."""
    return line.decode("utf-8", "backslashreplace").replace("\0", "\\x00")


@dataclass(frozen=True, slots=True)
class Printed:
    """One line of one rank, prefix included."""

    stream: Stream
    text: str
    update: bool = False


class _Pipe:
    """One stream: the read end, what is held of its last line, and its log."""

    def __init__(self, stream: Stream, log: Path) -> None:
        self.stream: Stream = stream
        self.fd, self.write_fd = os.pipe()
        # A copy in a later fork server would hide the end of file.
        keep_in_launcher(self.fd)
        keep_in_launcher(self.write_fd)
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):  # the user's share of pipe memory is used up
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.lines = LineSplitter()
        self.log = log
        self.warning = ""  # why the log lacks something, once
        self._log_fd = -1
        try:
            self._log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._warn(error)

    def read(self) -> list[Line] | None:
        """Lines there are now; None at the end of the stream."""
        lines: list[Line] = []
        for _ in range(TURN_BYTES // READ_BYTES):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                return lines or None
            self._keep(data)
            lines += self.lines.feed(data)
        return lines

    def close(self) -> None:
        self.close_writer()
        close_in_launcher(self.fd)
        if self._log_fd >= 0:
            os.close(self._log_fd)
        self.fd = self._log_fd = -1

    def close_writer(self) -> None:
        close_in_launcher(self.write_fd)
        self.write_fd = -1

    def _keep(self, data: bytes) -> None:
        """Into the log. A full disk costs log lines, not the run; there may be room again later."""
        if self._log_fd < 0:
            return
        try:
            while data:
                data = data[os.write(self._log_fd, data) :]
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        self.warning = self.warning or f"{self.log} lacks output: {error.strerror}"


class RankOutput:
    """Both streams of one rank: pipes to give it, lines to show, logs to keep.

    `stdout_fd` and `stderr_fd` are the write ends for the spawn request; close them in the
    launcher with `close_writers` once the rank has them, or the end is never seen.
    """

    def __init__(self, prefix: str, *, stdout_log: Path, stderr_log: Path) -> None:
        self._prefix = prefix
        self._pipes = [_Pipe("stdout", stdout_log), _Pipe("stderr", stderr_log)]
        self._told: set[Stream] = set()

    @property
    def stdout_fd(self) -> int:
        return self._pipes[0].write_fd

    @property
    def stderr_fd(self) -> int:
        return self._pipes[1].write_fd

    def close_writers(self) -> None:
        """The launcher's copies of the write ends."""
        for pipe in self._pipes:
            pipe.close_writer()

    def poll_fds(self) -> list[int]:
        """What to poll for reading; a stream that ended is no longer among them."""
        return [pipe.fd for pipe in self._pipes if pipe.fd >= 0]

    def read(self) -> list[Printed]:
        """Whole lines there are now, both streams, each in its order. Never blocks."""
        printed: list[Printed] = []
        for pipe in self._pipes:
            if pipe.fd < 0:
                continue
            lines = pipe.read()
            if lines is None:
                lines = pipe.lines.flush()
                pipe.close()
            printed += self._dressed(pipe.stream, lines)
        return printed

    def finish(self) -> list[Printed]:
        """After the rank's death: what is left in the pipes, and what was held; then close.

        A process the rank left behind may hold a write end, so an end of file is not waited for.
        """
        printed: list[Printed] = []
        for pipe in self._pipes:
            if pipe.fd >= 0:
                lines = pipe.read() or []  # one turn is more than a pipe holds
                printed += self._dressed(pipe.stream, lines + pipe.lines.flush())
            pipe.close()
        return printed

    def take_warnings(self) -> list[str]:
        """One sentence per log that lacks something, told once."""
        new = [pipe for pipe in self._pipes if pipe.warning and pipe.stream not in self._told]
        self._told |= {pipe.stream for pipe in new}
        return [pipe.warning for pipe in new]

    def _dressed(self, stream: Stream, lines: list[Line]) -> list[Printed]:
        return [Printed(stream, self._prefix + line.text, update=line.update) for line in lines]
