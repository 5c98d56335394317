"""Leave a function of the user that has hung, by an alarm in the main thread.

The exception is raised wherever the function is, so its traceback shows where it hung. It reaches
a Python loop, a sleep, a lock, a read; a call that never comes back from C is not reached, and
neither is any thread but the main one: there a function has all the time it takes. A script that
handles SIGALRM itself keeps it, and has no limit. Nothing of the user is known here.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

Result = TypeVar("Result")

LONGEST_S: Final = 1e8  # three years; a timer takes no such thing as 1e300
SOONEST_S: Final = 1e-6  # 0 would switch a timer off that is overdue
AGAIN_S: Final = 0.02  # at least between two strikes: what they interrupt must get anywhere


class Abandoned(BaseException):
    """Raised into a function that has hung. No `except Exception` of its own keeps it."""


def within(timeout_s: float, function: Callable[[], Result]) -> Result:
    """What `function` returns. Raises Abandoned out of it when it lasts longer, where it can.

    One that catches it and goes on is interrupted again after as long. Handler and timer of
    SIGALRM are afterwards as they were, an alarm that was pending in its old place in time.
    """
    if not _can_interrupt():
        return function()
    alarm = _Alarm(timeout_s)
    try:
        try:
            alarm.arm()
            return function()
        finally:
            alarm.is_armed = False
    finally:
        alarm.is_armed = False  # it may have struck in the line above
        alarm.put_back()


def _can_interrupt() -> bool:
    """In the main thread of a script that has no handler of its own, and none from C."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)


class _Alarm:
    """One loan of SIGALRM."""

    def __init__(self, timeout_s: float) -> None:
        self.is_armed = False
        self._timeout_s = min(timeout_s, LONGEST_S)
        self._before = signal.getsignal(signal.SIGALRM)
        self._pending = (0.0, 0.0)  # of the user: seconds left, interval
        self._began = time.monotonic()
        self._handler = self._strike  # one object, to be known again

    def arm(self) -> None:
        signal.signal(signal.SIGALRM, self._handler)
        self.is_armed = True
        first, again = max(self._timeout_s, SOONEST_S), max(self._timeout_s, AGAIN_S)
        self._pending = signal.setitimer(signal.ITIMER_REAL, first, again)

    def _strike(self, signum: int, frame: FrameType | None) -> None:
        if self.is_armed:
            raise Abandoned(f"abandoned after {self._timeout_s:g} s")

    def put_back(self) -> None:
        if signal.getsignal(signal.SIGALRM) is not self._handler:
            return  # the function has put its own in place: they are the user's now
        left, interval = self._pending
        if left:
            left = max(left - (time.monotonic() - self._began), SOONEST_S)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
