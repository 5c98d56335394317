"""Stacks of another process come back whole, whatever it is doing, and cost it nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from flodl_shm.ids import Nanos
from flodl_shm.proc import stacks
from flodl_shm.proc.stacks import Frame, StackCall, is_listening, parse

CHILD = """
import itertools, sys, threading, time
from pathlib import Path
from flodl_shm.proc import stacks

def beside():
    time.sleep(60)

def inside():
    print("ready", flush=True)
    ACT

threading.Thread(target=beside, daemon=True).start()
assert stacks.register(Path(sys.argv[1])) == ""
inside()
"""
ANSWER = """\
Thread 0x00007f0000000001 (most recent call first):
  File "a.py", line 3 in inner
  File "dir with ", line/b.py", line 12 in outer

Current thread 0x00007f0000000002 (most recent call first):
  File "c.py", line 7 in <module>
  ...
"""


def now() -> Nanos:
    return Nanos(time.monotonic_ns())


def answer_of(call):
    while (answer := call.poll(now())) is None:
        time.sleep(0.002)
    return answer


@pytest.fixture
def child(tmp_path):
    """Starts a process that does ACT; it is gone afterwards."""
    begun = []

    def start(act):
        code = CHILD.replace("ACT", act)
        words = [sys.executable, "-c", code, str(tmp_path / "stacks.txt")]
        begun.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        assert begun[-1].stdout.readline() == b"ready\n"
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.procs
@pytest.mark.parametrize(
    "act",
    ["time.sleep(60)", "all(itertools.repeat(1))  # keeps the GIL", "threading.Event().wait()"],
)
def test_a_process_answers_whatever_it_does_and_again(child, tmp_path, act):
    process = child(act)
    assert is_listening(process.pid)
    for _ in range(2):
        call = StackCall(tmp_path / "stacks.txt", now())
        process.send_signal(stacks.SIGNAL)
        told = parse(answer_of(call))
        assert {stack.frames[-1].function for stack in told} >= {"<module>"}
        assert {"beside", "inside"} <= {f.function for stack in told for f in stack.frames}
    assert process.poll() is None


@pytest.mark.procs
def test_a_stopped_process_gives_none_and_costs_half_a_second(child, tmp_path):
    process = child("time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    began = now()
    call = StackCall(tmp_path / "stacks.txt", began)
    process.send_signal(stacks.SIGNAL)
    assert call.poll(Nanos(began + stacks.WAIT_NS - 1)) is None
    assert call.poll(Nanos(began + stacks.WAIT_NS)) == ""


@pytest.mark.procs
def test_who_has_no_handler_is_told_apart():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_listening(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not is_listening(process.pid)


def test_an_answer_is_whole_when_the_file_has_come_to_rest(tmp_path):
    file = tmp_path / "stacks.txt"
    file.write_text("older\n")
    call = StackCall(file, Nanos(0))
    ms = 1_000_000
    assert call.poll(Nanos(20 * ms)) is None
    file.write_text("older\nfirst part")
    assert call.poll(Nanos(30 * ms)) is None
    file.write_text("older\nfirst part, and second")
    assert call.poll(Nanos(45 * ms)) is None
    assert call.poll(Nanos(54 * ms)) is None
    assert call.poll(Nanos(55 * ms)) == "first part, and second"


def test_a_file_that_never_comes_is_an_empty_answer(tmp_path):
    call = StackCall(tmp_path / "none", Nanos(0))
    assert call.poll(Nanos(1)) is None
    assert call.poll(Nanos(stacks.WAIT_NS)) == ""


def test_threads_and_calls_are_read_and_the_last_word_of_a_thread_stands():
    first, second = parse(ANSWER)
    assert first.frames == (
        Frame("a.py", 3, "inner"),
        Frame('dir with ", line/b.py', 12, "outer"),
    )
    assert second.thread == "0x00007f0000000002"
    assert second.text() == '  File "c.py", line 7, in <module>\n'
    again = parse(ANSWER + "Thread 0x00007f0000000001 (most recent call first):\n")
    assert again[0].frames == ()
    assert parse("what is this\n  File\n") == ()


def test_a_place_that_cannot_be_written_is_a_reason(tmp_path):
    assert stacks.register(tmp_path / "no" / "where") == (
        f"{tmp_path}/no/where: No such file or directory"
    )
    assert not is_listening(os.getpid())
