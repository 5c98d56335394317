"""kill -9 of the launcher, at any moment, leaves no server, no rank and no worker within 2 s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "FLODL_TEST_MARK"

LAUNCHER = """
import os, signal, sys, time
from flodl_shm.proc.fork_server import ForkServer, SpawnRequest
from flodl_shm.proc.lifeline import Lifeline

moment = sys.argv[1]

def say(text):
    os.write(1, text.encode() + b"\\n")

def preload():
    if moment == "preload":
        say("now")
        time.sleep(60)

def entry(ticket, fds):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for own_session in () if moment == "both" else (False, True):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            time.sleep(60)
            os._exit(0)
    say("rank")
    while True:  # holds on to the processor, as a long step does
        pass

server = ForkServer.start(entry, preload=preload, lifeline=Lifeline())
deadline = time.monotonic_ns() + 60 * 10**9
server.wait_ready(deadline=deadline)
if moment == "ready":
    say("now")
    time.sleep(60)
for rank in range(2 if moment == "training" else 40):
    server.spawn(SpawnRequest(ticket=b"", stdout=1, stderr=2), deadline=deadline)
if moment == "both":
    say(str(server.pid))
if moment == "stopped":
    os.kill(server.pid, signal.SIGSTOP)
    say("now")
time.sleep(60)
"""


def family(mark: str) -> list[str]:
    """Living processes with our mark in the environment they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue  # gone since, or a zombie
    return found


@pytest.mark.parametrize(
    ("moment", "word", "count"),
    [
        ("preload", "now", 1),
        ("ready", "now", 1),
        ("spawning", "rank", 1),
        ("training", "rank", 2),
    ],
)
def test_nothing_is_left(moment, word, count):
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, moment], env=env, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    guard = threading.Timer(20, launcher.kill)  # a launcher that says nothing ends the reading
    guard.start()
    try:
        for _ in range(count):
            assert launcher.stdout.readline().strip() == word.encode()
        assert len(family(mark)) >= 2
    finally:
        guard.cancel()
        launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        launcher.wait(10)
        launcher.stdout.close()
    while family(mark) and time.monotonic() - killed < 2.0:
        pass
    assert family(mark) == []


def test_a_stopped_server_goes_too():
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    script = LAUNCHER.replace("else 40", "else 1")
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, "stopped"], env=env, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    try:
        # Having forked a rank, the server is past the state in which it is killed with us.
        assert {launcher.stdout.readline().strip() for _ in range(2)} == {b"rank", b"now"}
    finally:
        launcher.kill()
        killed = time.monotonic()
        launcher.wait(10)
        launcher.stdout.close()
    while family(mark) and time.monotonic() - killed < 2.0:
        pass
    assert family(mark) == []


def test_ranks_do_not_outlive_launcher_and_server_killed_together():
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    script = LAUNCHER.replace("else 40", "else 1")
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, "both"], env=env, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    try:
        said = {launcher.stdout.readline().strip() for _ in range(2)} - {b"rank"}
        launcher.send_signal(signal.SIGSTOP)  # it must not do the killing
        os.kill(int(said.pop()), signal.SIGKILL)
    finally:
        launcher.kill()
        killed = time.monotonic()
        launcher.wait(10)
        launcher.stdout.close()
    while family(mark) and time.monotonic() - killed < 2.0:
        pass
    assert family(mark) == []
