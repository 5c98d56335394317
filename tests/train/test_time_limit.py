"""A function that hangs is left where it hangs; what the script does with SIGALRM stays its own."""

from __future__ import annotations

import signal
import threading
import traceback

import pytest

from flodl_shm.train.time_limit import Abandoned, within

SOON = 0.02


@pytest.fixture(autouse=True)
def nobodys_alarm():
    """As in a script that has never heard of SIGALRM."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.setitimer(signal.ITIMER_REAL, *timer)
    signal.signal(signal.SIGALRM, before)


def state():
    return signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)


def spin():
    while True:
        pass


def test_what_returns_in_time_is_passed_on():
    assert within(60, lambda: 7) == 7
    assert state() == (signal.SIG_DFL, (0, 0))


@pytest.mark.parametrize("hang", [spin, threading.Event().wait, threading.Lock().__enter__])
def test_what_hangs_is_left_where_it_hangs(hang):
    if hang is not spin and hang.__self__.__class__.__name__ == "lock":
        hang()  # held: the next one waits
    with pytest.raises(Abandoned, match=r"abandoned after 0.02 s") as caught:
        within(SOON, lambda: hang())
    assert "hang()" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert state() == (signal.SIG_DFL, (0, 0))


def test_except_exception_does_not_keep_it():
    def stubborn():
        try:
            spin()
        except Exception:
            return "kept"

    with pytest.raises(Abandoned):
        within(SOON, stubborn)


def test_one_that_catches_all_is_interrupted_again():
    caught = []

    def stubborn():
        for _ in range(2):
            try:
                spin()
            except BaseException as error:
                caught.append(error)
        spin()

    with pytest.raises(Abandoned):
        within(SOON, stubborn)
    assert len(caught) == 2


def test_what_it_raises_comes_through():
    with pytest.raises(KeyError):
        within(60, lambda: {}["x"])
    assert state() == (signal.SIG_DFL, (0, 0))


def test_a_script_that_handles_alarms_has_no_limit():
    came = threading.Event()

    def handler(signum, frame):
        came.set()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, SOON)
    assert within(SOON / 10, lambda: came.wait(30))
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_alarm_of_the_script_that_is_pending_is_put_back():
    signal.setitimer(signal.ITIMER_REAL, 500, 7)
    within(60, lambda: None)
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert 490 < left <= 500
    assert interval == pytest.approx(7, abs=0.01)


def test_an_alarm_that_became_due_meanwhile_comes_right_after():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1e-6)
    within(60, lambda: threading.Event().wait(0.001))
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN


def test_what_the_function_itself_does_with_alarms_stays():
    def handler(signum, frame):
        raise AssertionError("it is 500 s off")

    def function():
        signal.signal(signal.SIGALRM, handler)
        signal.alarm(500)

    within(60, function)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 490


def test_in_another_thread_there_is_no_limit():
    results = []
    done = threading.Event()

    def function():
        results.append(state())
        return done.wait(30)

    thread = threading.Thread(target=lambda: results.append(within(1e-9, function)))
    thread.start()
    done.set()
    thread.join(30)
    assert results == [(signal.SIG_DFL, (0, 0)), True]


@pytest.mark.parametrize("timeout_s", [1e300, 1e-300])
def test_lengths_no_timer_takes(timeout_s):
    if timeout_s > 1:
        assert within(timeout_s, lambda: 7) == 7
    else:
        with pytest.raises(Abandoned):
            within(timeout_s, spin)
