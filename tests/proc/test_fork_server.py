"""Ranks start as fresh programs and end with what they started, and every end is told."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings

import pytest

from flodl_shm.errors import HostUnfit, PeersLost
from flodl_shm.ids import Nanos
from flodl_shm.proc.fork_server import SpawnRequest
from flodl_shm.proc.lifeline import Lifeline
from flodl_shm.proc.procfs import children_of, own_threads, read_stat


def readable(fds, seconds):
    import select

    return select.select(fds, [], [], seconds)[0]


def soon(seconds=10.0):
    return Nanos(time.monotonic_ns() + int(seconds * 1e9))


def end_as_told(ticket: bytes, fds: list[int]) -> None:
    if ticket == b"text":
        sys.exit("no such file")
    if ticket == b"raise":
        raise KeyError("the user's own")
    if ticket == b"segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if ticket == b"interrupt":
        raise KeyboardInterrupt
    if ticket == b"wait":
        print("waiting", flush=True)
        signal.pause()
    if ticket:
        sys.exit(int(ticket))


@pytest.mark.parametrize(
    ("ticket", "cause", "printed"),
    [
        (b"", "exit 0", b""),
        (b"0", "exit 0", b""),
        (b"3", "exit 3", b""),
        (b"259", "exit 3", b""),
        (b"text", "exit 1", b"no such file"),
        (b"raise", "exit 1", b'KeyError: "the user\'s own"'),
        (b"segv", "signal 11 (SIGSEGV)", b"Fatal Python error: Segmentation fault"),
        (b"interrupt", "signal 2 (SIGINT)", b"KeyboardInterrupt"),
    ],
)
def test_an_end_is_told_in_words(rig, ticket, cause, printed):
    run = rig(end_as_told)
    child = run.spawn(0, ticket)
    run.settle(child)
    assert child.cause() == cause
    run.hear(printed)


def test_a_killed_rank_is_a_readable_pidfd_and_then_a_status(rig):
    run = rig(end_as_told)
    child = run.spawn(0, b"wait")
    run.hear(b"waiting")
    os.kill(child.pid, signal.SIGKILL)
    assert readable([child.pidfd], 2.0)
    run.settle(child)
    assert child.cause() == "signal 9 (SIGKILL)"
    assert not child.is_alive


def test_environment_descriptors_and_ticket_arrive(rig, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setenv("FLODL_TEST_GONE", "1")

    def entry(ticket, fds):
        names = ("RANK", "FLODL_TEST_GONE", "OPENBLAS_NUM_THREADS")
        os.write(fds[1], json.dumps([len(ticket), {n: os.environ.get(n) for n in names}]).encode())
        os.write(fds[0], b"first")

    run = rig(entry)
    (a_r, a_w), (b_r, b_w) = os.pipe(), os.pipe()
    ticket = os.urandom(1_000_000)  # larger than any packet
    child = run.spawn(0, ticket, fds=(a_w, b_w), env={"RANK": "5", "FLODL_TEST_GONE": None})
    run.settle(child)
    assert child.cause() == "exit 0"
    os.close(a_w)
    os.close(b_w)
    assert os.read(a_r, 100) == b"first"
    env = {"RANK": "5", "FLODL_TEST_GONE": None, "OPENBLAS_NUM_THREADS": "7"}
    assert json.loads(os.read(b_r, 1000)) == [len(ticket), env]
    assert os.read(a_r, 1) == b""  # nobody else has kept a copy
    os.close(a_r)
    os.close(b_r)


def test_a_rank_is_like_a_fresh_program(rig):
    server_facts: dict[str, str | None] = {}

    def preload():
        server_facts["blas"] = os.environ.get("OPENBLAS_NUM_THREADS")
        server_facts["collects"] = str(gc.isenabled())

    def entry(ticket, fds):
        facts = {
            "collects": [server_facts["collects"], gc.isenabled()],
            "session": os.getsid(0) == os.getpid(),
            "stdin": sys.stdin.read(),
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
            "chld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "threads": own_threads(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "blas": server_facts["blas"],
        }
        print(json.dumps(facts))

    first = rig(entry, preload)
    one = first.spawn(0)
    first.settle(one)
    facts = json.loads(first.hear(b"\n"))
    del facts["descriptors"]
    assert facts == {
        "collects": ["False", True],  # not while the server imports, but in the rank
        "session": True,
        "stdin": "",
        "term": True,
        "int": True,
        "chld": True,
        "blocked": [],
        "threads": 1,
        "blas": "1",
    }


def test_exit_handlers_of_the_rank_run_and_those_of_its_ancestors_do_not(rig):
    def ancestor():
        os.write(2, b"ANCESTOR")

    def entry(ticket, fds):
        def late():
            print("thread done")

        atexit.register(print, "own handler")
        threading.Thread(target=late).start()
        kept["directory"] = tempfile.TemporaryDirectory()
        print("made", kept["directory"].name)

    kept: dict[str, tempfile.TemporaryDirectory[str]] = {}
    inherited = tempfile.TemporaryDirectory()
    atexit.register(ancestor)
    try:
        run = rig(entry)
        child = run.spawn(0)
        run.settle(child)
    finally:
        atexit.unregister(ancestor)
    said = run.hear(b"own handler").decode()
    assert "thread done" in said
    assert "ANCESTOR" not in said
    assert os.path.isdir(inherited.name)
    made = said.split("made ")[1].splitlines()[0]
    assert not os.path.exists(made)
    inherited.cleanup()


def test_loader_workers_of_a_rank_end_in_order_with_it(rig):
    def entry(ticket, fds):
        import multiprocessing

        worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        worker.start()
        print("worker", worker.pid)

    def preload():
        import multiprocessing.util  # noqa: F401

    run = rig(entry, preload)
    child = run.spawn(0)
    run.settle(child)
    assert child.cause() == "exit 0"
    worker = int(run.hear(b"\n").split()[1])
    assert read_stat(worker) is None


def test_what_a_killed_rank_started_dies_with_it(rig):
    def entry(ticket, fds):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        print("grandchild", pid, flush=True)
        signal.pause()

    run = rig(entry)
    child = run.spawn(0)
    pidfd = os.pidfd_open(int(run.hear(b"\n").split()[1]))
    os.kill(child.pid, signal.SIGKILL)
    run.settle(child)
    assert readable([pidfd], 2.0)
    os.close(pidfd)


def test_closing_the_server_ends_even_what_left_the_ranks_session(rig):
    def entry(ticket, fds):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            print("daemon", os.getpid(), flush=True)
            signal.pause()
        signal.pause()

    run = rig(entry)
    run.spawn(0)
    pidfd = os.pidfd_open(int(run.hear(b"\n").split()[1]))
    run.server.close()
    assert readable([pidfd], 2.0)
    os.close(pidfd)


def test_cycles_leave_no_descriptors_and_no_zombies(rig):
    run = rig(end_as_told)
    server = f"/proc/{run.server.pid}/fd"
    run.settle(run.spawn(0))
    before = len(os.listdir("/proc/self/fd")), len(os.listdir(server))
    for _ in range(20):
        run.settle(run.spawn(0), run.spawn(1, b"3"))
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir(server))) == before
    assert children_of(run.server.pid) == []
    assert run.server.pid in children_of(os.getpid())


def test_a_failing_preload_tells_its_traceback(rig):
    def preload():
        raise ImportError("no torch here")

    run = rig(end_as_told, preload)
    with pytest.raises(HostUnfit, match="no torch here"):
        run.spawn(0)


def test_a_server_that_dies_while_loading_is_named(rig):
    run = rig(end_as_told, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeersLost, match=r"is gone: signal 9 \(SIGKILL\) while the launcher waited"):
        run.spawn(0)


def test_a_slow_server_is_named_when_the_deadline_passes(rig):
    run = rig(end_as_told, lambda: time.sleep(20))
    with pytest.raises(PeersLost, match=r"took too long to finish its imports"):
        run.server.wait_ready(deadline=soon(0.05))
    os.kill(run.server.pid, signal.SIGKILL)


def test_a_stopped_server_costs_one_deadline_and_its_late_rank_is_killed(rig):
    run = rig(end_as_told)
    run.server.wait_ready(deadline=soon())
    os.kill(run.server.pid, signal.SIGSTOP)
    request = SpawnRequest(ticket=b"wait", stdout=run.write_fd, stderr=run.write_fd)
    with pytest.raises(PeersLost, match="took too long to fork a rank"):
        run.server.spawn(request, deadline=soon(0.05))
    os.kill(run.server.pid, signal.SIGCONT)
    ends = []
    until = soon()
    while not ends and time.monotonic_ns() < until:
        readable(run.server.poll_fds(), 0.1)
        ends = run.server.exits()
    assert [end.status.words() for end in ends] == ["signal 9 (SIGKILL)"]


def test_the_servers_death_takes_its_ranks_and_is_reported(rig):
    def entry(ticket, fds):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        print("grandchild", pid, flush=True)
        signal.pause()

    run = rig(entry)
    child = run.spawn(0)
    grandchild = os.pidfd_open(int(run.hear(b"\n").split()[1]))
    os.kill(run.server.pid, signal.SIGKILL)
    run.settle(child)
    assert "signal 9 (SIGKILL)" in run.supervisor.server_lost
    assert child.cause().startswith("ended, status unknown, the fork server")
    assert run.supervisor.poll_fds() == []
    assert readable([grandchild], 2.0)
    os.close(grandchild)
    with pytest.raises(PeersLost, match="the fork server"):
        run.spawn(1)


def test_a_terminals_signals_do_not_end_the_server(rig):
    run = rig(end_as_told)
    run.server.wait_ready(deadline=soon())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(run.server.pid, signum)
    child = run.spawn(0, b"3")
    run.settle(child)
    assert child.cause() == "exit 3"


def test_a_later_server_does_not_hold_an_earlier_runs_lifeline(rig):
    def entry(ticket, fds):
        print("mine", flush=True)
        signal.pause()

    first = rig(entry)
    second = rig(entry)
    child = second.spawn(0)
    second.hear(b"mine")
    first.lifeline.cut()
    assert readable([first.lifeline.read_fd], 2.0)
    assert not readable([second.lifeline.read_fd], 0)
    assert child.is_alive


def test_a_server_ends_by_the_lifeline_alone(rig):
    run = rig(end_as_told)
    child = run.spawn(0, b"wait")
    run.hear(b"waiting")
    pidfd = os.pidfd_open(run.server.pid)
    run.lifeline.cut()
    assert len(readable([pidfd], 2.0)) == 1
    assert readable([child.pidfd], 2.0)
    os.close(pidfd)


def test_threads_of_the_server_are_counted(rig):
    def preload():
        threading.Thread(target=lambda: time.sleep(20), daemon=True).start()

    run = rig(end_as_told, preload)
    assert run.server.wait_ready(deadline=soon()).threads == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        child = run.spawn(0)
    run.settle(child)
    assert child.cause() == "exit 0"


def test_torch_is_imported_once_and_the_server_keeps_one_thread(rig):
    def preload():
        import torch  # noqa: F401

    def entry(ticket, fds):
        import torch

        print(int(torch.arange(10).sum()), flush=True)

    run = rig(entry, preload)
    assert run.server.wait_ready(deadline=soon(60)).threads == 1
    began = time.monotonic()
    children = [run.spawn(rank) for rank in range(4)]
    assert time.monotonic() - began < 2.0
    run.settle(*children)
    assert [child.cause() for child in children] == ["exit 0"] * 4
    assert run.hear(b"45\n45\n45\n45\n")


def test_a_lifeline_closes_once():
    line = Lifeline()
    line.close()
    line.close()
