"""A region at the bottom of a terminal that is drawn again and again; lines pass above it.

Drawn when the launcher's loop calls, never by a thread: the launcher stays single-threaded. Lines
are held until the next drawing, so each drawing is one write: it does not flicker, and a loud
rank does not cost a drawing per line. The cursor is never hidden and stands below the region, so
there is nothing to put back when the process is stopped or killed. A terminal that takes nothing
(Ctrl-S, a hung connection) is not waited for: the ranks would wait too.
"""

from __future__ import annotations

import io
import os
import re
import select
from collections import deque
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from flodl_shm.ids import Nanos

    Row = RenderableType | tuple[RenderableType, ...]  # a tuple is set side by side
    Region = Callable[[int, int], Sequence[Row]]  # (width, height) -> rows

EVERY_NS: Final = 250_000_000
MOST_HELD: Final = 2000  # lines; a terminal that takes no more loses the oldest, the logs do not
MANY: Final = 200  # held lines that are not kept waiting for the next drawing
FALLBACK: Final = (80, 24)
# Escape sequences but for colours: they would move the cursor out of its place.
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MOVES: Final = re.compile(r"\x1b(?!\[[0-9;]*m)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|[^\[\]])?")


class _Page(io.StringIO):
    """What rich writes to. It asks for the encoding, to know which characters it may use."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


class LiveScreen:
    """Owns the bottom of one terminal until `close`. Raises OSError and ValueError as streams do.

    `size` says (columns, rows) of the terminal, `ready` whether it takes something without a wait.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool = True,
        size: Callable[[], tuple[int, int]] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self._stream = stream
        self._size = size or self._terminal_size
        self._ready = ready or self._takes_more
        self._page = _Page(getattr(stream, "encoding", None) or "utf-8")
        self._console = Console(
            file=self._page,
            force_terminal=True,
            color_system="standard" if colour else None,
            highlight=False,
            legacy_windows=False,
            _environ={},
        )
        self._held: deque[str] = deque()
        self._left_out = 0
        self._widths: list[int] = []  # of the rows that stand on the terminal now
        self._next_at = 0

    def line(self, text: str) -> None:
        """A line that shall stand above the region, with the next drawing."""
        if len(self._held) >= MOST_HELD:
            self._held.popleft()
            self._left_out += 1
        self._held.append(text)

    def tick(self, now: Nanos, region: Region) -> None:
        """Draw if it is time to. Call as often as convenient."""
        if now < self._next_at and len(self._held) < MANY:
            return
        if not self._ready():
            return
        self._next_at = now + EVERY_NS
        rows = self._rendered(region) if self._is_ours() else []
        self._put(rows)

    def close(self) -> None:
        """Take the region away and show what is held. Twice is harmless."""
        if self._held or self._widths:
            self._put([])

    # ---- drawing --------------------------------------------------------------------------------

    def _rendered(self, region: Region) -> list[str]:
        columns, lines = self._size()
        # The last column stays free: a full row would wrap on some terminals.
        width, height = max(1, columns - 1), max(2, lines)
        self._page.seek(0)
        self._page.truncate()
        self._console.size = (width, height)
        for row in region(width, height):
            for part in row if isinstance(row, tuple) else (row,):
                if getattr(part, "no_wrap", None):  # a Text's own word is lost in `print`
                    self._console.print(part, end="", no_wrap=True, overflow="ellipsis")
                else:
                    self._console.print(part, end="")
            self._page.write("\n")
        encoding = self._page.encoding
        text = self._page.getvalue().encode(encoding, "replace").decode(encoding)
        return text.split("\n")[:-1][: height - 1]

    def _put(self, rows: list[str]) -> None:
        """One write: erase, lines, region."""
        parts = [self._erased(), *(_tamed(line) + "\n" for line in self._taken())]
        parts += [row + "\n" for row in rows]
        self._widths = [len(ESCAPES.sub("", row)) for row in rows]
        self._stream.write("".join(parts))
        self._stream.flush()

    def _erased(self) -> str:
        if not self._widths:
            return ""
        columns = max(1, self._size()[0])
        # On a terminal that has become narrower since, long rows have been wrapped.
        rows = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\x1b[{rows}F\x1b[J"

    def _taken(self) -> list[str]:
        lines = list(self._held)
        self._held.clear()
        if self._left_out:
            lines.insert(0, f"... {self._left_out} lines left out: the terminal took none")
            self._left_out = 0
        return lines

    # ---- the terminal ---------------------------------------------------------------------------

    def _terminal_size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return FALLBACK
        return columns or FALLBACK[0], lines or FALLBACK[1]  # some serial lines say 0

    def _takes_more(self) -> bool:
        try:
            poll = select.poll()
            poll.register(self._stream.fileno(), select.POLLOUT)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def _is_ours(self) -> bool:
        """False while the launcher is a background job: the region would be drawn over a shell."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True  # not our controlling terminal: nobody else's foreground


def _tamed(line: str) -> str:
    """A rank's line without what moves the cursor, and with its colours ended."""
    if "\x1b" not in line:
        return line
    return MOVES.sub("", line) + "\x1b[0m"
