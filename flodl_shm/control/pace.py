"""When a rank starts another batch: the one rule of elastic windows, and the means it needs.

The anchor rank does its steps; every other rank asks at each batch boundary whether half of
another batch fits before the anchor rank's predicted end. Ending at the *nearest* boundary halves
the overshoot of "stop at the first boundary after it", and needs no agreement: each rank reads the
anchor rank's progress and pace and decides alone. Ranks and the simulator share this code; it
reads no clock and no cells.
"""

from __future__ import annotations

from collections import deque

from flodl_shm.ids import Nanos

RECENT = 8  # batches a pace is the mean of: it follows a throttled device within a window


class Pace:
    """How long a rank's own batches take lately; one outlier does not move it."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT)

    def add(self, batch_ns: int) -> None:
        """Note one finished batch; a time that is not positive says nothing and is ignored."""
        if batch_ns > 0:
            self._recent.append(batch_ns)

    @property
    def mean_ns(self) -> int:
        """Mean of the recent batches without the longest and the shortest; 0 if unknown.

        Both ends are left out, so symmetric jitter does not bias the mean. Of two batches the
        shorter counts: the first one of a process carries its warm-up.
        """
        ordered = sorted(self._recent)
        if len(ordered) < 3:
            return ordered[0] if ordered else 0
        inner = ordered[1:-1]
        return sum(inner) // len(inner)


def predicted_end(
    last_ns: Nanos, *, done: int, anchor_steps: int, pace_ns: int, now: Nanos
) -> Nanos | None:
    """When the anchor rank will have done its steps; None while its pace is unknown.

    `last_ns` is when it finished its last step of this window, or began the window with done == 0.
    The step it is in has not ended by `now`, so the steps after it are still to come in full: while
    it hangs in one long step the end moves on with the clock.
    """
    left = anchor_steps - done
    if left <= 0:
        return last_ns
    if pace_ns <= 0:
        return None
    return Nanos(max(last_ns + left * pace_ns, now + (left - 1) * pace_ns))


def starts_another(*, now: Nanos, own_ns: int, anchor_end: Nanos | None) -> bool:
    """Whether half of a batch of `own_ns` fits before the anchor rank's end; unknown: go on."""
    return anchor_end is None or now + own_ns / 2 <= anchor_end
