"""What the live view shows of a run: rows of text made from the tally.

Figures in, rich renderables out; where and when they are drawn is the screen's business. Columns
are set by hand: a rich Table costs fifteen times as much, and the launcher has ranks to serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress_bar import ProgressBar
from rich.text import Text

from flodl_shm.obs.words import duration, fraction, number, percent, rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flodl_shm.ids import Nanos, Rank
    from flodl_shm.obs.live_screen import Row
    from flodl_shm.obs.rank_tally import RankTally
    from flodl_shm.obs.tally import Tally

FIXED = 34  # columns of a rank's row beside its device
LEAST_BAR = 10
OTHER_ROWS = 7  # rows beside the ranks' and the alerts', the cursor's included


@dataclass(frozen=True, slots=True)
class Standing:
    """What the view needs beside the tally: all of it is computed for the plain view too."""

    done: float  # of the whole run, 0 .. 1
    epoch_done: float
    left_s: float | None
    idle: Sequence[float]  # by rank
    alerts: Sequence[str] = ()  # the newest, which must not scroll away


def region(tally: Tally, standing: Standing, *, now: Nanos, width: int, height: int) -> list[Row]:
    """The rows, from the top. At most `height` of them where a row fits `width`."""
    rows: list[Row] = [_row(alert, "bold red") for alert in standing.alerts]
    if tally.last_commit is None:
        return [*rows, _starting(tally, now)]
    rows.append(_bar(tally, standing, width))
    rows += _ranks(tally, standing, width, height - OTHER_ROWS - len(standing.alerts))
    rows.append(_figures(tally))
    rows.append(_waste(tally))
    return rows


def _starting(tally: Tally, now: Nanos) -> Text:
    there = sum(bool(rank.rows) for rank in tally.ranks.values())
    waited = duration((now - tally.facts.started_at) / 1e9)
    return _row(f"starting: {there} of {len(tally.ranks)} ranks are there, {waited}", "dim")


def _bar(tally: Tally, standing: Standing, width: int) -> Row:
    commit = tally.last_commit
    assert commit is not None
    left = "" if standing.left_s is None else f"  {duration(standing.left_s)} left"
    before = f"epoch {commit.epoch} {percent(standing.epoch_done)} "
    after = f" {percent(standing.done)}{left}"
    room = width - len(before) - len(after)
    if room < LEAST_BAR:
        return _row(before + "of it," + after)
    bar = ProgressBar(total=1.0, completed=standing.done, width=room)
    return Text(before), bar, Text(after)


def _ranks(tally: Tally, standing: Standing, width: int, most: int) -> Iterable[Text]:
    longest = max(len(rank.device) for rank in tally.ranks.values())
    room = max(6, min(longest, width - FIXED))
    head = f"rank {'device':<{room}} share window  idle     rate"
    shown = len(tally.ranks) if len(tally.ranks) <= max(1, most) else max(1, most - 1)
    rows = [_row(head, "dim")]
    for number_, rank in list(tally.ranks.items())[:shown]:
        rows.append(_rank(tally, number_, rank, standing.idle[number_], room))
    if shown < len(tally.ranks):
        rows.append(_row(f"     ... and {len(tally.ranks) - shown} more", "dim"))
    return rows


def _rank(tally: Tally, number_: Rank, rank: RankTally, idle: float, room: int) -> Text:
    device = rank.device[:room]
    if rank.is_dead:
        speed, style = "lost", "red"
    elif rank.finished is not None:
        speed, style = "done", ""
    else:
        speed, style = f"{rate(rank.rate or None)}/s", ""
    return _row(
        f"{number_:>4} {device:<{room}} {percent(tally.share(number_)):>5} "
        f"{rank.window_batches:>6} {percent(idle):>5} {speed:>8}",
        style,
    )


def _figures(tally: Tally) -> Text:
    commit, efficiency = tally.last_commit, tally.efficiency()
    assert commit is not None
    parts = [f"reduce {commit.round}", f"{rate(tally.picks_per_s)} picks/s"]
    if commit.loss is not None:
        parts.append(f"loss {number(commit.loss)}")
    parts.append(f"he {fraction(efficiency.he)}")
    return Text("  ".join(parts))


def _waste(tally: Tally) -> Text:
    waste = tally.efficiency().waste
    parts = "  ".join(f"{name} {100 * part:.1f}%" for name, part in waste.items())
    return Text(f"waste: {parts}", "dim")


def _row(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
