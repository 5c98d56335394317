"""The user's epoch function: who calls it, what waits for it, and the learning rate it sets.

It is called once at each epoch's beginning, after the last round of the epoch before and before
the first window of its own, by the rank that has the role. That window is held until the function
has returned, on all ranks, so that the rate it sets is every rank's from the first step on. If the
rank dies in it, the next holder is asked. Windows and rounds are not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.messages import AdjustRate, CallEpochFn, Note
from flodl_shm.errors import PeerBroke

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.messages import Action, CallbackRan
    from flodl_shm.control.roles import Roles
    from flodl_shm.ids import Rank, Row


class EpochFunction:
    """All ranks train at `lr`, or if None at the schedule's rate; either times `scale`."""

    def __init__(self, roles: Roles, meta: CheckpointMeta | None = None) -> None:
        self._roles = roles
        self.lr = meta.lr if meta else None
        self.scale = meta.lr_scale if meta else 1.0
        self._asked: Rank | None = None
        self._epoch = -1
        self._before = (self.lr, self.scale)  # of what this epoch's function says

    @property
    def caller(self) -> Rank | None:
        """The rank that is in the function, or about to be; None: nothing waits for it."""
        return self._asked

    def ask(
        self, epoch: int, living: Mapping[Rank, Row], fastest: Callable[[], Rank]
    ) -> Iterator[Action]:
        """An epoch is about to begin: have the function called, if there is one."""
        holder, why = self._roles.holder("epoch", living, fastest)
        if why:
            yield Note("roles", why, alert=holder is None)
        if epoch != self._epoch:
            self._before = (self.lr, self.scale)
        self._asked, self._epoch = holder, epoch
        if holder is not None:
            yield CallEpochFn(rank=holder, epoch=epoch)

    def renew(self, living: Mapping[Rank, Row], fastest: Callable[[], Rank]) -> Iterator[Action]:
        """Ask the next one if the rank that was asked is dead."""
        if self._asked is not None and self._asked not in living:
            yield from self.ask(self._epoch, living, fastest)

    def ran(self, report: CallbackRan, living: Iterable[Rank]) -> Iterator[Action]:
        """The function has returned, or raised: nothing waits for it any more.

        Raises PeerBroke if nobody asked for it.
        """
        if (report.rank, report.epoch) != (self._asked, self._epoch):
            raise PeerBroke(
                f"rank {report.rank} called the epoch function of epoch {report.epoch} unasked"
            )
        self._asked = None
        if report.error:
            text = f"the epoch function failed in epoch {report.epoch}: {report.error}"
            yield Note("epoch", text, alert=True)
        if report.lr is None and report.lr_scale == 1.0:
            return
        if report.lr is not None:  # replaces all that was said before; a factor comes on top
            self.lr, self.scale = report.lr, 1.0
        self.scale *= report.lr_scale
        yield from self._adjust(living)

    def rate_of(self, trained: Container[int]) -> tuple[float | None, float]:
        """`lr` and `scale` for a checkpoint of a state in which these epochs have begun.

        The function of another epoch is called once more after a resume, so what it has said
        meanwhile does not count: the factor would come twice.
        """
        if self._epoch < 0 or self._epoch in trained:
            return self.lr, self.scale
        return self._before

    def tell(self, living: Iterable[Rank]) -> Iterator[Action]:
        """Have all ranks train at the rate that was wanted last, if one was."""
        if self.lr is not None or self.scale != 1.0:
            yield from self._adjust(living)

    def _adjust(self, living: Iterable[Rank]) -> Iterator[Action]:
        for rank in living:
            yield AdjustRate(rank=rank, lr=self.lr, scale=self.scale)
