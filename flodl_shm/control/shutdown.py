"""The stop ladder: what the n-th request to stop means.

First: finish the windows that are issued, then leave. Second: now. Third: kill. The ladder counts
requests, whoever makes them, and knows nothing of signals or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flodl_shm.control.messages import Stop

WORDS = ("stopping after this window", "stopping now", "killing what is left")


@dataclass(slots=True)
class StopLadder:
    """Counts the requests of one run."""

    pressed: int = 0

    def press(self, why: str) -> tuple[Stop, str]:
        """One more request; the event for the coordinator and a sentence for the user."""
        self.pressed = min(self.pressed + 1, len(WORDS))
        again = ("; once more to stop now", "; once more to kill", "")[self.pressed - 1]
        return Stop(level=self.pressed, why=why), f"{why}: {WORDS[self.pressed - 1]}{again}"

    def skip_to(self, level: int) -> None:
        """Go on as if `level` requests had been made, where the first ones ask for nothing."""
        self.pressed = max(self.pressed, level)
