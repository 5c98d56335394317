"""Whole lines for the screen, every byte for the log, never a block."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.proc.output import PIPE_BYTES, Line, LineSplitter, RankOutput


def texts(lines):
    return [line.text for line in lines]


def test_lines_are_whole_wherever_the_bytes_are_cut():
    text = "eins\nzw\u00f6lf \U0001f600\n\nlast"
    for cut in range(len(text.encode()) + 1):
        splitter = LineSplitter()
        lines = splitter.feed(text.encode()[:cut]) + splitter.feed(text.encode()[cut:])
        assert texts(lines + splitter.flush()) == ["eins", "zw\u00f6lf \U0001f600", "", "last"]


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_any_cuts_of_plain_lines_give_the_same_lines(parts):
    data = b"".join(parts).replace(b"\r", b"")
    whole = LineSplitter(limit=16)
    expected = whole.feed(data) + whole.flush()
    pieces = LineSplitter(limit=16)
    lines: list[Line] = []
    for part in parts:
        lines += pieces.feed(part.replace(b"\r", b""))
    assert lines + pieces.flush() == expected


def test_of_a_progress_bar_only_the_last_update_comes_through():
    splitter = LineSplitter()
    assert splitter.feed(b"\r 1%\r 2%\r 3%\r 4%") == [Line(" 3%", update=True)]
    assert splitter.feed(b"\r 5%") == [Line(" 4%", update=True)]
    assert splitter.feed(b"\r100%\n") == [Line("100%")]
    assert splitter.flush() == []


def test_windows_line_ends_are_line_ends():
    splitter = LineSplitter()
    assert splitter.feed(b"one\r") == []
    assert splitter.feed(b"\ntwo\r\n") == [Line("one"), Line("two")]


def test_what_is_no_text_is_spelled_out():
    assert texts(LineSplitter().feed(b"a\0b\xff\n")) == ["a\\x00b\\xff"]


def test_a_huge_line_is_cut_once_and_costs_no_memory():
    splitter = LineSplitter(limit=100)
    lines = []
    for _ in range(160):
        lines += splitter.feed(b"\xc3\xa9" * 32 * 1024)  # 10 MiB without an end
        assert len(splitter._held) <= 100
    lines += splitter.feed(b"tail\nnext\n")
    assert len(lines) == 2
    assert lines[0].text.startswith("\u00e9" * 50 + " ... (cut")
    assert lines[1].text == "next"
    lone = LineSplitter(limit=10)
    assert lone.feed(b"x" * 11 + b"\n")[0].text.startswith("x" * 10 + " ... (cut")


def test_a_cut_never_splits_a_character():
    splitter = LineSplitter(limit=5)
    assert splitter.feed(b"abcd\xc3\xa9\n")[0].text.startswith("abcd ... (cut")


def test_a_line_after_a_cut_progress_bar_is_seen():
    splitter = LineSplitter(limit=10)
    assert len(splitter.feed(b"x" * 20)) == 1
    assert splitter.feed(b"more\rdone") == []
    assert texts(splitter.feed(b"\nnext\n")) == ["done", "next"]


@pytest.fixture
def output(tmp_path):
    output = RankOutput("[r0] ", stdout_log=tmp_path / "out", stderr_log=tmp_path / "err")
    yield output
    output.finish()


def test_both_streams_are_read_prefixed_and_kept(output, tmp_path):
    os.write(output.stdout_fd, b"to out\nhalf")
    os.write(output.stderr_fd, b"to err\n")
    assert [(p.stream, p.text) for p in output.read()] == [
        ("stdout", "[r0] to out"),
        ("stderr", "[r0] to err"),
    ]
    assert output.read() == []  # and did not block
    output.close_writers()
    assert [p.text for p in output.read()] == ["[r0] half"]
    assert output.poll_fds() == []
    assert (tmp_path / "out").read_bytes() == b"to out\nhalf"
    assert (tmp_path / "err").read_bytes() == b"to err\n"


def test_a_writer_left_behind_does_not_hold_up_the_end(output):
    kept = os.dup(output.stdout_fd)
    os.write(kept, b"last words")
    output.close_writers()
    assert [p.text for p in output.finish()] == ["[r0] last words"]
    assert output.finish() == []
    os.close(kept)


def test_a_full_disk_costs_the_log_and_one_warning():
    output = RankOutput("", stdout_log=Path("/dev/full"), stderr_log=Path("/dev/full"))
    for _ in range(3):
        os.write(output.stdout_fd, b"line\n")
        assert [p.text for p in output.read()] == ["line"]
    assert output.take_warnings() == ["/dev/full lacks output: No space left on device"]
    assert output.take_warnings() == []
    output.finish()


def test_a_log_that_cannot_be_made_costs_one_warning(tmp_path):
    missing = tmp_path / "no" / "dir"
    output = RankOutput("", stdout_log=missing, stderr_log=tmp_path / "err")
    assert output.take_warnings() == [f"{missing} lacks output: No such file or directory"]
    os.write(output.stdout_fd, b"line\n")
    assert [p.text for p in output.finish()] == ["line"]


def test_two_ranks_floods_stay_whole_lines_in_order(rig, tmp_path):
    def entry(ticket, fds):
        import sys

        for number in range(2000):
            print(f"{ticket.decode()} {number} " + "x" * 200)
            print(f"{number}", file=sys.stderr)

    run = rig(entry)
    outputs = {}
    children = []
    for rank in (0, 1):
        out = RankOutput(
            f"[r{rank}] ", stdout_log=tmp_path / f"o{rank}", stderr_log=tmp_path / f"e{rank}"
        )
        children.append(spawn_into(run, rank, (out.stdout_fd, out.stderr_fd)))
        out.close_writers()
        outputs[rank] = out
    seen = {0: [], 1: []}
    until = time.monotonic() + 20
    while any(out.poll_fds() for out in outputs.values()):
        assert time.monotonic() < until
        for rank, out in outputs.items():
            seen[rank] += [p.text for p in out.read() if p.stream == "stdout"]
    run.settle(*children)
    for rank in (0, 1):
        assert seen[rank] == [f"[r{rank}] r{rank} {n} " + "x" * 200 for n in range(2000)]
        assert (tmp_path / f"e{rank}").read_text() == "".join(f"{n}\n" for n in range(2000))


def spawn_into(run, rank, fds):
    from flodl_shm.ids import Nanos
    from flodl_shm.proc.fork_server import SpawnRequest

    request = SpawnRequest(ticket=f"r{rank}".encode(), stdout=fds[0], stderr=fds[1])
    deadline = Nanos(time.monotonic_ns() + 10_000_000_000)
    return run.supervisor.spawn(rank, rank, request, deadline=deadline)


def test_a_burst_fits_the_pipe(output):
    os.set_blocking(output.stdout_fd, False)
    assert os.write(output.stdout_fd, b"\n" * PIPE_BYTES) == PIPE_BYTES
