"""A steady value out of few readings, some of which are wrong.

floDl takes the plain mean of the last five, so one outlier of a hundredfold still makes a rank look
twentyfold slow. Here it is the mean of those of the last five that lie near their median: without
outliers nearly all of them count, as in the mean; up to two wrong ones of five change
nothing; a lasting change is the median's at its third reading and then the whole value. A median
alone would follow as fast but be noisier. Price: of two speeds that alternate it sees one; elastic
windows absorb that.
"""

from __future__ import annotations

from collections import deque

KEPT = 5
# Part of the median: far above jitter of a window's mean, below any change that matters.
NEAR = 0.25


class Smoothed:
    """The last readings of one quantity (any unit, not negative) and their robust mean."""

    def __init__(self, first: float | None = None) -> None:
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._provisional = False  # the only reading so far is a makeshift
        if first is not None:
            self.add(first)

    def add(self, reading: float, *, provisional: bool = False) -> None:
        """Take a reading. A provisional first one goes when the next one comes."""
        if self._provisional:
            self._recent.clear()
        self._provisional = provisional and not self._recent and not self._provisional
        self._recent.append(reading)

    @property
    def readings(self) -> int:
        """How many readings the value rests on at most."""
        return len(self._recent)

    @property
    def value(self) -> float | None:
        """The robust mean; None without a reading.

        Of an even number the lower middle one is the median: whatever disturbs a time makes it
        longer, so of two the shorter is the likelier.
        """
        if not self._recent:
            return None
        ordered = sorted(self._recent)
        median = ordered[(len(ordered) - 1) // 2]
        near = [reading for reading in ordered if abs(reading - median) <= NEAR * median]
        return sum(near) / len(near)
