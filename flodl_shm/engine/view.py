"""Which view of a run a stream gets, from what was asked for and what the stream is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from flodl_shm.ids import Rank
from flodl_shm.obs.progress import Progress, View

if TYPE_CHECKING:
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.obs.tally import Tally

NO_COLOUR = "NO_COLOR is set"


def open_view(config: RunConfig, tally: Tally, stream: TextIO, errors: TextIO) -> Progress:
    """The run's Progress; ranks' stderr goes to `errors`.

    Says so where the live view that was asked for cannot be.
    """
    mode, why = choose(config.progress, plain=config.plain, is_terminal=_is_terminal(stream))
    view = View(
        mode=mode,
        colour=config.plain != NO_COLOUR,
        quiet=config.quiet,
        verbose=config.verbose,
        beside=[
            " ".join(f"slow {one}" for one in config.slow_of(Rank(rank)))
            for rank in range(config.ranks)
        ],
    )
    progress = Progress(tally, stream, view, errors=errors)
    if why and not config.quiet:
        progress.say(why)
    return progress


def choose(asked: str, *, plain: str, is_terminal: bool) -> tuple[str, str]:
    """(mode, a sentence if it is not what was asked for). `plain` is why none should be drawn.

    NO_COLOR asks for no colours; whoever sets it and leaves the view to us wants it plain.
    """
    if asked == "auto":
        return ("live" if is_terminal and not plain else "line"), ""
    if asked != "live":
        return asked, ""
    if not is_terminal:
        return "line", "--progress live draws on a terminal; this is none, so there are lines"
    if plain and plain != NO_COLOUR:
        return "line", f"--progress live cannot draw here ({plain}), so there are lines"
    return "live", ""


def plainness(no_color: str | None, term: str | None) -> str:
    """Why nothing should be drawn, from the environment's NO_COLOR and TERM; empty: it may be."""
    if not term:
        return "TERM is not set"
    if term in ("dumb", "unknown"):
        return f"TERM is {term}"
    return NO_COLOUR if no_color else ""


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False
