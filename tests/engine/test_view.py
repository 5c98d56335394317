"""Which view a stream gets, and the live one on a real terminal, to each of its ends."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from flodl_shm.engine.view import NO_COLOUR, choose, plainness

LIMIT_S = 60.0
FAILS = """
from base import *

steps = 0
def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 3:
        print("from the script")
    if RANK == 1 and steps == 600:
        raise ValueError("a broken batch")
    import time; time.sleep(0.001)
    return mse(model, batch)

train(train_step=step, dataset=data(4096), epochs=50)
"""


@pytest.mark.parametrize(
    ("asked", "plain", "is_terminal", "mode"),
    [
        ("auto", "", True, "live"),
        ("auto", "", False, "line"),
        ("auto", NO_COLOUR, True, "line"),
        ("auto", "TERM is dumb", True, "line"),
        ("live", "", True, "live"),
        ("live", NO_COLOUR, True, "live"),
        ("live", "TERM is dumb", True, "line"),
        ("live", "", False, "line"),
        ("line", "", True, "line"),
        ("json", "", True, "json"),
        ("none", "", True, "none"),
    ],
)
def test_who_gets_which_view(asked, plain, is_terminal, mode):
    chosen, why = choose(asked, plain=plain, is_terminal=is_terminal)
    assert chosen == mode
    assert bool(why) == (asked == "live" and mode != "live")


@pytest.mark.parametrize(
    ("no_color", "term", "told"),
    [
        (None, "xterm", ""),
        ("", "xterm", ""),
        ("1", "xterm", NO_COLOUR),
        (None, "dumb", "TERM is dumb"),
        ("1", "dumb", "TERM is dumb"),
        (None, None, "TERM is not set"),
        (None, "", "TERM is not set"),
    ],
)
def test_what_asks_for_plainness(no_color, term, told):
    assert plainness(no_color, term) == told


class Watched:
    """A command on a terminal of 40 columns, and everything it has written there."""

    def __init__(self, place, words, env):
        self.leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 40))
        self.before = termios.tcgetattr(follower)
        command = [sys.executable, "-m", "flodl_shm.run", *words]
        env = env | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, cwd=place, env=env, stdin=follower, stdout=follower, stderr=follower
        )
        self.follower = follower  # kept: its settings are looked at afterwards
        self.written = b""

    def read_until(self, text):
        """Everything up to the first appearance of `text`; to the end with None."""
        deadline = time.monotonic() + LIMIT_S
        while text is None or text not in self.written:
            ready, _, _ = select.select([self.leader], [], [], 0.05)
            if ready:
                self.written += os.read(self.leader, 65536)
            elif self.process.poll() is not None:
                break
            assert time.monotonic() < deadline, self.written[-3000:]

    def end(self):
        self.read_until(None)
        try:
            assert termios.tcgetattr(self.follower) == self.before
        finally:
            os.close(self.follower)
            os.close(self.leader)
        return self.process.returncode, self.written.decode()


def screen_after(text, columns=40):
    """The rows that are left, by a terminal that knows what is used and nothing else."""
    rows, current = [], ""
    pieces = re.split(r"(\x1b\[\d+F\x1b\[J|\r?\n)", re.sub(r"\x1b\[[0-9;]*m", "", text))
    for piece in pieces:
        if up := re.fullmatch(r"\x1b\[(\d+)F\x1b\[J", piece):
            assert int(up[1]) <= len(rows)
            del rows[len(rows) - int(up[1]) :]
            current = ""
        elif piece.endswith("\n"):
            rows += [current[i : i + columns] for i in range(0, max(1, len(current)), columns)]
            current = ""
        else:
            assert "\x1b" not in piece, repr(piece)
            current += piece
    return rows


@pytest.mark.procs
def test_a_real_terminal_is_as_before_after_an_interrupt_and_after_an_error(launches, tmp_path):
    env = launches.environment(tmp_path)
    env.pop("NO_COLOR", None)
    (tmp_path / "base.py").write_text(_base())
    (tmp_path / "train.py").write_text(FAILS)
    paced = "--workload paced --ranks 2 --step-ms 5,10 --picks 100000 --name stopped"
    stopped = Watched(tmp_path, paced.split(), env)
    failed = Watched(tmp_path, ["--ranks", "2", "--show-ranks", "all", "train.py"], env)
    stopped.read_until(b"lost 0.0%")
    stopped.process.send_signal(signal.SIGINT)
    code, text = stopped.end()
    assert code == -signal.SIGINT, text
    rows = screen_after(text)
    assert any(row.startswith("stopped") for row in rows), rows
    assert not any(row.startswith("rank device") for row in rows), rows
    code, text = failed.end()
    assert code == 1, text
    assert "reduce " in text
    rows = screen_after(text)
    assert "[r0] from the script" in rows
    assert rows[-1] == "ValueError: a broken batch"
    assert not any(row.startswith("rank device") for row in rows), rows


def _base():
    from pathlib import Path

    found = re.search(
        r'^BASE = """\n(.*?)^"""',
        Path(__file__).with_name("conftest.py").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return found[1]


def test_a_closed_stream_is_no_terminal():
    from flodl_shm.engine.view import _is_terminal

    stream = io.StringIO()
    assert not _is_terminal(stream)
    stream.close()
    assert not _is_terminal(stream)
