"""How a process ended, as the kernel says it, and in words. No policy."""

from __future__ import annotations

import os
import signal

import msgspec


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9; the bare number for real-time signals, which have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


class ExitStatus(msgspec.Struct, frozen=True, array_like=True):
    """Either an exit code or a signal; exactly one of them is meaningful."""

    value: int
    by_signal: bool = False

    @classmethod
    def from_siginfo(cls, info: os.waitid_result) -> ExitStatus:
        """Translate what waitid(2) reports for a process that has ended."""
        return cls(value=info.si_status, by_signal=info.si_code != os.CLD_EXITED)

    @property
    def code(self) -> int | None:
        """The exit code, None after a signal."""
        return None if self.by_signal else self.value

    @property
    def signum(self) -> int | None:
        """The signal it died of, None after an exit."""
        return self.value if self.by_signal else None

    def words(self) -> str:
        """`exit 3` or `signal 9 (SIGKILL)`."""
        if self.by_signal:
            return f"signal {self.value} ({signal_name(self.value)})"
        return f"exit {self.value}"
