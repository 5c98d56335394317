"""Who brought numbers that are no numbers: refused contributions, and losses that say nothing.

A rank looks at its own replica before it arrives; one that is not finite enters no mean, and the
round gives its rank the consensus back. Here is what follows from that over the rounds: an alert
for each, the loss of a rank that was refused too often in a row, and the end of the training when
a round has nobody left whose parameters are finite. How a replica is looked at is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.messages import Action, Arrived, Kill, Note
from flodl_shm.errors import RankFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flodl_shm.control.reduce_cycle import Living
    from flodl_shm.control.window_ledger import Window
    from flodl_shm.ids import Rank, Round, Row

LIMIT = 3  # refusals in a row that cost a rank its place: consensus, and it breaks it each time
NAMED = 2  # ranks whose broken tensor is told when all are
HINT = "Lower the learning rate, or bound the gradients with max_grad_norm"


class Quarantine:
    """Of one run. Ranks are known by their row, so a new incarnation begins without a past."""

    def __init__(self) -> None:
        self._checkpoint = ""  # the newest one that is visible: where a user can go on from
        self._streak: dict[Row, int] = {}  # refusals in a row
        self._since: dict[Row, Round] = {}  # every window since then had a loss not finite
        self._dropped: set[Row] = set()
        self._told: set[tuple[Rank, int]] = set()  # whose losses said nothing, in which epoch

    def saved(self, folder: str) -> None:
        """There is a checkpoint to go on from; empty: it has come to nothing."""
        self._checkpoint = folder or self._checkpoint

    def judge(self, window: Window, living: Living) -> Iterator[Action]:
        """Look at a settled round. Raises RankFailed when nobody in it has finite parameters."""
        reports = [window.arrived[rank] for rank in window.contributors]
        for report in reports:
            yield from self._look(report, window, living)
        if reports and all(report.refused for report in reports):
            raise self._diverged(window.round, reports)
        for rank, row in living.items():
            if self._streak.get(row, 0) >= LIMIT and row not in self._dropped:
                yield from self._drop(rank, row, living)

    def _look(self, report: Arrived, window: Window, living: Living) -> Iterator[Action]:
        rank, row = report.rank, report.row
        if report.loss_count < report.batches:
            self._since.setdefault(row, report.round)
        elif report.batches:
            self._since.pop(row, None)
        if report.refused:
            self._streak[row] = self._streak.get(row, 0) + 1
            yield Note("numbers", self._refusal(report, window), alert=True)
        elif report.batches:
            self._streak.pop(row, None)
            lives = living.get(rank) == row  # what a dead rank never reported has no losses
            if lives and not report.loss_count and (rank, window.epoch) not in self._told:
                self._told.add((rank, window.epoch))
                text = (
                    f"rank {rank}: none of {report.batches} losses of round {report.round} in "
                    f"epoch {window.epoch} is finite, though its parameters are"
                )
                yield Note("numbers", text, alert=True)

    def _refusal(self, report: Arrived, window: Window) -> str:
        text = (
            f"rank {report.rank}'s part of round {report.round} in epoch {window.epoch} is "
            f"refused: {_fault(report)}; {window.picks.get(report.rank, 0)} picks trained nothing, "
            f"the rank goes on with the consensus"
        )
        if report.reset:
            text += f" and without the optimizer state of {report.reset} parameters"
        return text

    def _drop(self, rank: Rank, row: Row, living: Living) -> Iterator[Action]:
        """Let it go, unless nobody would be left."""
        if len([one for one in living.values() if one not in self._dropped]) < 2:
            return
        self._dropped.add(row)
        why = f"its parameters were not finite in {self._streak[row]} rounds in a row"
        yield Note("numbers", f"rank {rank} is dropped: {why}", alert=True)
        yield Kill(rank, row, why)

    def _diverged(self, number: Round, reports: list[Arrived]) -> RankFailed:
        told = "; ".join(self._history(report) for report in reports[:NAMED])
        hint = f"{HINT}; {self._way_back()}"
        return RankFailed(
            f"the training has diverged: after round {number} no rank's parameters are finite "
            f"({told})",
            hint=hint,
        )

    def _history(self, report: Arrived) -> str:
        since = self._since.get(report.row)
        losses = (
            "its losses were finite" if since is None else f"loss not finite since round {since}"
        )
        return f"rank {report.rank}: {_fault(report)}, {losses}"

    def _way_back(self) -> str:
        if not self._checkpoint:
            return "there is no checkpoint to go on from."
        return f"the newest checkpoint is {self._checkpoint}."


def _fault(report: Arrived) -> str:
    """What is broken; of a dead rank that never said so only the cells are known."""
    return report.broken or "its parameters are not finite"
