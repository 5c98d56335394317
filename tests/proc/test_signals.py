"""Signals come out of the pipe in order, none raises, and dying of one is what the parent sees."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flodl_shm.proc.signals import LAUNCHER_SIGNALS, SignalPipe, die_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pipe():
    pipe = SignalPipe()
    yield pipe
    pipe.restore()


def raise_here(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_signals_are_noted_in_order(pipe):
    for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        raise_here(signum)
    assert pipe.read() == [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
    assert pipe.read() == []


def test_a_signal_ends_a_poll(pipe):
    poller = select.poll()
    poller.register(pipe.fd, select.POLLIN)
    child = subprocess.Popen([sys.executable, "-c", f"import os; os.kill({os.getpid()}, 10)"])
    assert poller.poll(10_000) == [(pipe.fd, select.POLLIN)]
    assert child.wait(10) == 0
    assert pipe.read() == [signal.SIGUSR1]


def test_a_storm_neither_raises_nor_blocks(pipe):
    for _ in range(70_000):  # more than the pipe holds
        raise_here(signal.SIGUSR2)
    assert set(pipe.read()) == {signal.SIGUSR2}


def test_everything_is_put_back():
    before = {signum: signal.getsignal(signum) for signum in LAUNCHER_SIGNALS}
    pipe = SignalPipe()
    assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
    pipe.restore()
    pipe.restore()
    assert {signum: signal.getsignal(signum) for signum in LAUNCHER_SIGNALS} == before
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    assert wakeup == -1


def test_signals_of_others_are_not_ours(pipe):
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    raise_here(signal.SIGWINCH)
    signal.signal(signal.SIGWINCH, before)
    assert pipe.read() == []


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pipe = SignalPipe()
    try:
        raise_here(signal.SIGHUP)
        raise_here(signal.SIGTERM)
        assert pipe.read() == [signal.SIGTERM]
    finally:
        pipe.restore()
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_to_die_of_a_signal_flushes_and_is_seen_by_the_parent(signum, tmp_path):
    script = (
        "import sys, signal\n"
        "from flodl_shm.proc.signals import SignalPipe, die_of\n"
        "pipe = SignalPipe()\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(signum)}}})\n"
        "sys.stdout.write('last words')\n"
        f"die_of({int(signum)})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, timeout=20
    )
    assert done.returncode == -signum
    assert done.stdout == b"last words"
    assert list(tmp_path.iterdir()) == []  # no core file


def test_who_survives_the_signal_exits_as_a_shell_would_say(monkeypatch):
    # Process 1 of a container ignores signals with the default action; a child with kill() made
    # harmless stands in for it.
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(os, "kill", lambda *_: None)
            die_of(signal.SIGTERM)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
