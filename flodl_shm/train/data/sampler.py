"""From a grant's spans to the picks of each batch. Knows no dataset and no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flodl_shm.errors import WeBroke

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flodl_shm.control.messages import Span


class PickQueue:
    """The picks one rank may consume in one window, in order."""

    def __init__(self, spans: Sequence[Span], order: NDArray[np.int64], *, skip: int = 0) -> None:
        """`order` is the epoch's permutation; the first `skip` picks were consumed before."""
        parts = [order[start:stop] for start, stop in spans]
        granted = sum(stop - start for start, stop in spans)
        if sum(map(len, parts)) != granted or not 0 <= skip <= granted:
            raise WeBroke(
                f"no picks {list(spans)} less the first {skip} in an epoch of {len(order)} picks"
            )
        self._picks = np.concatenate(parts)[skip:] if parts else order[:0]
        self.taken = 0

    @property
    def left(self) -> int:
        """Picks that can still be taken."""
        return len(self._picks) - self.taken

    def take(self, picks: int) -> NDArray[np.int64]:
        """Numbers of the next batch's picks: `picks` of them, fewer at the end, 1-D int64."""
        batch = self._picks[self.taken : self.taken + picks]
        self.taken += len(batch)
        return batch
