"""The live view on terminals that are not there: what stands on them after each drawing."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flodl_shm.control.messages import Note
from flodl_shm.ids import Nanos
from flodl_shm.obs.live_screen import EVERY_NS, MANY, MOST_HELD, LiveScreen
from flodl_shm.obs.live_view import Standing, region
from flodl_shm.obs.progress import Progress, View
from flodl_shm.obs.summary import summary
from flodl_shm.obs.tally import RunFacts, Tally

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """Knows the two sequences that are used, and wraps at its width."""

    def __init__(self, columns=80, lines=24):
        super().__init__()
        self.columns, self.lines = columns, lines
        self.rows = []
        self.writes = 0

    def write(self, text):
        self.writes += 1
        for piece in re.split(r"(\x1b\[\d+F\x1b\[J)", COLOURS.sub("", text)):
            up = re.fullmatch(r"\x1b\[(\d+)F\x1b\[J", piece)
            if up:
                assert int(up[1]) <= len(self.rows), "the cursor leaves the region"
                del self.rows[-int(up[1]) :]
                continue
            assert "\x1b" not in piece
            assert piece == "" or piece.endswith("\n")
            for line in piece.splitlines():
                wrapped = [line[i : i + self.columns] for i in range(0, len(line), self.columns)]
                self.rows += wrapped or [""]
        return len(text)

    def size(self):
        return self.columns, self.lines


def watched(tally, terminal, **view):
    """A live Progress on a made-up terminal."""
    progress = Progress(tally, terminal, View(mode="live", clock=lambda: "14:22:05", **view))
    if progress._screen is not None:
        progress._screen._size = terminal.size
    return progress


def trained(feed):
    feed.form()
    for _ in range(3):
        feed.window({0: 4, 1: 2}, {0: 10, 1: 20}, wait_ms=2, data_ms=1, loss=2.0)
    return feed


def test_the_region_shows_every_figure(feed):
    terminal = Terminal()
    watched(trained(feed).tally, terminal).tick(Nanos(feed.now))
    assert terminal.rows[0].startswith("epoch 0 60% ")
    assert terminal.rows[0].endswith(" 60%  0.1 s left")
    assert terminal.rows[1:] == [
        "rank device share window  idle     rate",
        "   0 cpu      67%      4    5%    100/s",
        "   1 cpu      33%      2    5%     50/s",
        "reduce 4  135 picks/s  loss 2  he 0.90",
        "waste: barrier 0.0%  dispatch 3.0%  reduce 4.5%  data 2.3%  lost 0.0%",
    ]


def test_before_the_first_reduce_it_says_who_is_there(feed):
    terminal = Terminal()
    progress = watched(feed.tally, terminal)
    progress.tick(Nanos(feed.now + 2_000_000_000))
    assert terminal.rows == ["starting: 0 of 2 ranks are there, 2.0 s"]


def test_lines_pass_above_and_alerts_stay(feed):
    terminal = Terminal()
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    progress.feed(Note("death", "rank 1 lost", alert=True), Nanos(feed.now))
    for number in range(30):
        progress.pass_on(f"[r0] line {number}")
    progress.tick(Nanos(feed.now + EVERY_NS))
    assert terminal.rows[:31] == ["14:22:05 rank 1 lost", *(f"[r0] line {n}" for n in range(30))]
    assert terminal.rows[31] == "14:22:05 rank 1 lost"
    assert terminal.rows[32].startswith("epoch 0")
    assert len(terminal.rows) == 31 + 7


def test_at_the_end_only_lines_are_left(feed):
    terminal = Terminal()
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    progress.pass_on("[r0] last words")
    feed.finish()
    progress.end(summary(feed.tally, now=Nanos(feed.now)), Path("runs/one"))
    progress.close()
    assert terminal.rows[:2] == ["[r0] last words", "ok"]
    assert terminal.rows[-1] == "  summary runs/one/summary.json"


def test_it_is_drawn_four_times_a_second_at_most(feed):
    terminal = Terminal()
    progress = watched(trained(feed).tally, terminal)
    for ms in range(0, 1000, 10):
        progress.tick(Nanos(feed.now + ms * 1_000_000))
        progress.pass_on("[r0] a line")
    assert terminal.writes == 4


def test_many_lines_do_not_wait(feed):
    terminal = Terminal()
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    for _ in range(MANY):
        progress.pass_on("[r0] a line")
    progress.tick(Nanos(feed.now + 1))
    assert terminal.writes == 2


@pytest.mark.parametrize("columns", [1, 10, 20, 39, 40, 41, 60, 80, 200])
@pytest.mark.parametrize("ranks", [1, 2, 40])
def test_no_row_is_wider_than_the_terminal_and_the_region_fits_it(make_feed, columns, ranks):
    terminal = Terminal(columns)
    feed = make_feed()
    devices = tuple(f"cuda:{rank}" for rank in range(ranks))
    feed.tally = Tally(RunFacts("paced", "shm", ranks, devices, feed.now))
    feed.form()
    feed.window(dict.fromkeys(range(ranks), 3), dict.fromkeys(range(ranks), 20))
    progress = watched(feed.tally, terminal)
    progress.feed(Note("death", "rank 7 lost: " + "because " * 20, alert=True), Nanos(1))
    progress.tick(Nanos(feed.now))
    progress.pass_on("above")
    progress.tick(Nanos(feed.now + EVERY_NS))
    region_rows = terminal.rows[len(terminal.rows) - len(progress._screen._widths) :]
    assert 4 <= len(region_rows) < terminal.lines
    assert max(map(len, region_rows)) <= max(1, columns - 1)
    if columns >= 40:
        assert "lost" in " ".join(region_rows[-2:])
        assert any("... and" in row for row in region_rows) == (ranks == 40)


def test_a_terminal_that_got_narrower_is_cleared_of_what_it_has_wrapped(feed):
    terminal = Terminal(80)
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    terminal.columns = 40
    terminal.rows = [
        row[i : i + 40] for row in terminal.rows for i in range(0, max(len(row), 1), 40)
    ]
    progress.tick(Nanos(feed.now + EVERY_NS))
    assert terminal.rows[0].startswith("epoch 0 60%")
    assert max(map(len, terminal.rows)) < 40


def test_a_terminal_that_takes_nothing_is_not_waited_for():
    terminal = Terminal()
    ready = []
    screen = LiveScreen(terminal, size=terminal.size, ready=lambda: bool(ready))
    for number in range(MOST_HELD + 5):
        screen.line(f"line {number}")
        screen.tick(Nanos(EVERY_NS * number), lambda width, height: ["region"])
    assert terminal.writes == 0
    ready.append(True)
    screen.tick(Nanos(EVERY_NS * 9999), lambda width, height: ["region"])
    assert terminal.rows[0] == "... 5 lines left out: the terminal took none"
    assert terminal.rows[1] == "line 5"
    assert terminal.rows[-1] == "region"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m plain", "red plain"),
        ("\x1b[2J\x1b[1;1Hgone\x1b[?25l", "gone"),
        ("\x1b]0;title\x07text\x1bM", "text"),
        ("\x1b", ""),
    ],
)
def test_a_rank_cannot_move_the_cursor(line, shown):
    terminal = Terminal()
    screen = LiveScreen(terminal, size=terminal.size)
    screen.line(line)
    screen.close()
    assert terminal.rows == [shown]


def test_a_terminal_without_these_characters_gets_others(feed):
    class Ascii(Terminal):
        encoding = "ascii"

        def write(self, text):
            return super().write(text.encode("ascii").decode())

    terminal = Ascii(39)  # too narrow: it is cut with an ellipsis elsewhere
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    assert len(terminal.rows) > 5
    progress.pass_on("[r0] caf\u00e9")
    progress.close()
    progress.pass_on("[r0] na\u00efve")
    assert terminal.rows == ["[r0] caf\\xe9", "[r0] na\\xefve"]


def test_without_colours_there_are_none(feed):
    screen = io.StringIO()
    watched(trained(feed).tally, screen_of(screen), colour=False).tick(Nanos(feed.now))
    assert "\x1b" not in screen.getvalue()
    assert "epoch 0" in screen.getvalue()


def screen_of(stream):
    stream.size = lambda: (80, 24)
    return stream


def test_a_terminal_that_went_away_does_not_end_the_run(feed):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    progress = watched(trained(feed).tally, Gone())
    progress.pass_on("[r0] a line")
    for turn in range(3):
        progress.tick(Nanos(feed.now + turn * EVERY_NS))
    progress.end(summary(feed.tally, now=Nanos(feed.now)), Path("runs/one"))


def test_quiet_draws_nothing(feed):
    terminal = Terminal()
    watched(trained(feed).tally, terminal, quiet=True).tick(Nanos(feed.now))
    assert terminal.rows == []


def test_states_of_ranks(feed):
    trained(feed)
    feed.kill(1, arrived=4, last_sign_ms_ago=1)
    standing = Standing(done=0.5, epoch_done=0.5, left_s=None, idle=[0.0, 0.0])
    rows = region(feed.tally, standing, now=Nanos(feed.now), width=79, height=24)
    assert any("lost" in str(row) and str(row).startswith("   1") for row in rows)
    feed.finish(ranks=(0,))
    rows = region(feed.tally, standing, now=Nanos(feed.now), width=79, height=24)
    assert any(str(row).endswith("done") for row in rows)


def test_picks_on_their_way_into_the_consensus_are_not_lost(feed):
    trained(feed)
    before = feed.tally.efficiency().waste["lost"]
    rank = feed.tally.ranks[0]
    rank.reported += 100
    rank._open[feed.round] = 100
    assert feed.tally.efficiency().waste["lost"] == before == 0
    rank.settle(None)
    assert feed.tally.efficiency().waste["lost"] > 0


def test_nothing_of_it_runs_beside_the_launchers_thread(feed):
    before = threading.active_count()
    terminal = Terminal()
    progress = watched(trained(feed).tally, terminal)
    progress.tick(Nanos(feed.now))
    assert threading.active_count() == before
    progress.close()


@pytest.mark.procs
def test_rich_is_imported_only_for_it():
    code = (
        "import sys, flodl_shm.cli.main, flodl_shm.engine.view, flodl_shm.engine.recorder;"
        "assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
