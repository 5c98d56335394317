"""A bell wakes, never loses a wake-up, keeps its deadlines through signals, and stops spinning."""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest

from flodl_shm.errors import HostUnfit
from flodl_shm.shm import doorbell as module
from flodl_shm.shm.doorbell import (
    MISSES_TO_STOP,
    PROBE_EVERY,
    Doorbell,
    EventBell,
    SemaphoreBell,
)
from flodl_shm.shm.segment import Segment

MS = 1_000_000


@pytest.fixture
def cells():
    segment = Segment.create(4096, purpose="test")
    words = segment.view.cast("Q")
    yield words
    words.release()
    segment.close()


@pytest.fixture(params=["semaphore", "eventfd"])
def bell(request, cells):
    made = Doorbell.create(cells, 0, semaphores=request.param == "semaphore")
    yield made
    made.close()


def test_what_is_ready_costs_no_park(bell, cells):
    assert bell.wait(lambda: True, timeout_ns=0)
    assert cells[0] == 0


def test_a_deadline_is_kept_and_the_flag_cleared(bell, cells):
    flags = []
    started = time.monotonic_ns()
    assert not bell.wait(lambda: bool(flags.append(cells[0])), timeout_ns=20 * MS, spin_ns=0)
    assert 20 * MS <= time.monotonic_ns() - started < 2000 * MS
    assert flags[0] == 0
    assert 1 in flags  # re-checked with the flag up
    assert cells[0] == 0


def test_ringing_a_waiter_that_is_awake_costs_no_token(bell):
    bell.ring()
    assert not bell._bell.acquire(0)


def test_ringing_a_sleeper_and_ringing_always_leave_a_token(bell, cells):
    cells[0] = 1
    bell.ring()
    assert bell._bell.acquire(0)
    cells[0] = 0
    bell.ring_always()
    assert bell._bell.acquire(0)


def test_tokens_too_many_are_spurious_and_can_be_drained(bell):
    for _ in range(100):
        bell.ring_always()
    assert not bell.wait(lambda: False, timeout_ns=5 * MS, spin_ns=0)
    for _ in range(5):
        bell.ring_always()
    bell.drain()
    assert not bell._bell.acquire(0)


def test_a_store_between_check_and_sleep_is_seen_without_a_park(bell, cells, monkeypatch):
    monkeypatch.setattr(bell._bell, "acquire", lambda _: pytest.fail("parked on what was ready"))
    # Another process stores just before the flag goes up: only the re-check can see it.
    assert bell.wait(lambda: cells[0] == 1, timeout_ns=1000 * MS, spin_ns=0)


def test_a_lost_token_costs_one_park_only(bell, cells):
    asked = []

    def came_true_silently():
        asked.append(1)
        return len(asked) > 3

    started = time.monotonic_ns()
    assert bell.wait(came_true_silently, spin_ns=0)
    assert time.monotonic_ns() - started < 2000 * MS


def test_an_error_in_the_condition_leaves_the_flag_clear(bell, cells):
    def fails_asleep():
        if cells[0]:
            raise KeyError("condition")
        return False

    with pytest.raises(KeyError):
        bell.wait(fails_asleep, spin_ns=0)
    assert cells[0] == 0


def test_a_death_wakes_a_long_park(bell, cells, children, monkeypatch):
    monkeypatch.setattr(module, "PARK_NS", 10_000 * MS)

    def announce():
        while not cells[0]:
            pass
        cells[8] = 1
        bell.ring_always()

    child = children.fork(announce)
    assert bell.wait(lambda: cells[8] == 1, timeout_ns=10_000 * MS, spin_ns=0)
    assert children.join(child) == 0


@pytest.mark.parametrize("spin_ns", [0, 20_000])
def test_no_wake_up_is_lost_between_two_processes(bell, cells, children, monkeypatch, spin_ns):
    # Parks are stretched, so that one lost wake-up would cost seconds and not hide in the noise.
    monkeypatch.setattr(module, "PARK_NS", 5000 * MS)
    back = Doorbell.create(cells, 8, semaphores=bell.fd is None)
    rounds = 2000

    def echo():
        for turn in range(1, rounds + 1):
            assert bell.wait(lambda turn=turn: cells[16] == turn, spin_ns=spin_ns)
            cells[24] = turn
            back.ring()

    child = children.fork(echo)
    longest = 0
    for turn in range(1, rounds + 1):
        started = time.monotonic_ns()
        cells[16] = turn
        bell.ring()
        assert back.wait(lambda turn=turn: cells[24] == turn, spin_ns=spin_ns)
        longest = max(longest, time.monotonic_ns() - started)
    assert children.join(child) == 0
    assert longest < 2500 * MS
    back.close()


def test_handled_signals_do_not_end_a_wait(bell, children):
    def wait_under_fire():
        alarms = []
        signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        started = time.monotonic_ns()
        assert not bell.wait(lambda: False, timeout_ns=40 * MS, spin_ns=0)
        assert 40 * MS <= time.monotonic_ns() - started < 5000 * MS
        assert len(alarms) >= 3

    assert children.join(children.fork(wait_under_fire)) == 0


def test_what_a_handler_changed_is_seen_within_a_park(bell, cells, children):
    def wait_for_signal():
        arrived = []
        signal.signal(signal.SIGUSR1, lambda *_: arrived.append(1))
        cells[8] = 1
        started = time.monotonic_ns()
        assert bell.wait(lambda: bool(arrived), timeout_ns=10_000 * MS, spin_ns=0)
        assert time.monotonic_ns() - started < 5000 * MS

    child = children.fork(wait_for_signal)
    while not (cells[8] and cells[0]):
        pass
    os.kill(child, signal.SIGUSR1)
    assert children.join(child) == 0


def test_what_a_handler_raises_passes_through(bell, cells, children):
    def interrupted():
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        with pytest.raises(KeyboardInterrupt):
            bell.wait(lambda: False, spin_ns=0)
        assert cells[0] == 0

    assert children.join(children.fork(interrupted)) == 0


def test_spinning_stops_after_misses_and_is_tried_again(cells):
    bell = Doorbell.create(cells, 0)
    spun = []

    def one_wait() -> bool:
        asked = []
        bell.wait(lambda: bool(asked.append(cells[0])), timeout_ns=300_000, spin_ns=200_000)
        spun.append(asked[1:2] == [0])  # the second look came without the flag: a spin
        return spun[-1]

    for _ in range(MISSES_TO_STOP):
        one_wait()
    for _ in range(MISSES_TO_STOP, 2 * PROBE_EVERY):
        one_wait()
    probes = [turn for turn, did in enumerate(spun, start=1) if did]
    assert probes == [*range(1, MISSES_TO_STOP + 1), PROBE_EVERY, 2 * PROBE_EVERY]
    bell.close()


def test_a_spin_that_pays_turns_spinning_on_again(cells):
    bell = Doorbell.create(cells, 0)
    bell._misses = MISSES_TO_STOP
    bell._waits = PROBE_EVERY - 1
    asked = []
    assert bell.wait(lambda: len(asked) > 3 or bool(asked.append(1)), spin_ns=1000 * MS)
    assert bell._misses == 0
    bell.close()


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(errno.ENOSPC, "full"),
        module.posix_ipc.PermissionsError("no"),
        HostUnfit("waited for the lock"),
    ],
)
def test_where_semaphores_fail_an_eventfd_serves(cells, monkeypatch, trouble):
    def refuse(_self):
        raise trouble

    monkeypatch.setattr(SemaphoreBell, "__init__", refuse)
    bell = Doorbell.create(cells, 0)
    assert isinstance(bell._bell, EventBell)
    bell.close()


def test_semaphore_names_that_never_come_free_are_a_refusal(monkeypatch):
    class Taken:
        def __new__(cls, *_, **__):
            raise module.posix_ipc.ExistentialError

    monkeypatch.setattr(module.posix_ipc, "Semaphore", Taken)
    with pytest.raises(HostUnfit, match="16 random names in a row exist already"):
        SemaphoreBell()


def test_an_eventfd_bell_goes_over_a_descriptor(cells):
    bell = Doorbell.create(cells, 0, semaphores=False)
    assert bell.fd is not None
    adopted = Doorbell.adopt(cells, 0, os.dup(bell.fd))
    cells[0] = 1
    adopted.ring()
    assert bell._bell.acquire(0)
    bell.close()
    adopted.close()


def test_a_semaphore_bell_has_no_descriptor(cells):
    bell = Doorbell.create(cells, 0)
    assert bell.fd is None
    bell.close()


def test_a_full_bell_does_not_block_its_ringer(cells):
    bell = Doorbell.create(cells, 0, semaphores=False)
    os.eventfd_write(bell.fd, 2**64 - 2)
    bell.ring_always()
    assert bell._bell.acquire(0)
    bell.close()
