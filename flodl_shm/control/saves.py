"""Checkpoints on their way: wished for, ordered, written in parts, published or dropped.

    due         somebody wants one: an epoch's end, the script, a signal, the run's end
    collecting  every living rank has its order and writes its part; one of them the model too
    publishing  all parts are there and the round is in the consensus: the shell makes it visible

Rules. A save is of the state right after the newest round issued, so its orders can be given at
any time: ranks read them between that round's grant and the next. What it says of itself is taken
when that round commits. Several wishes for one state make one save. Without the model's part a
save is dropped, and due again with another writer until all living ranks were tried; without
another part it is published and says whose are there. A dead rank's part is not waited for, and
no part longer than PATIENCE times what a callback may take.

Not known here: files and folders, what an epoch is, when the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.messages import DropSave, Note, Publish, Save
from flodl_shm.control.window_ledger import SPREADING
from flodl_shm.errors import PeerBroke

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flodl_shm.control.checkpoint_meta import CheckpointMeta, Evaluation, SavedFile
    from flodl_shm.control.edge import Edge
    from flodl_shm.control.messages import Action, PartSaved, Published
    from flodl_shm.control.options import Settled
    from flodl_shm.control.roles import Roles
    from flodl_shm.ids import Nanos, Rank, Round

# Whose word counts if several ask for the same state: the one that says most about the run.
REASONS = ("end", "max_failure_exceeded", "graceful_shutdown", "checkpoint", "signal", "request")
MOST_COLLECTING = 2  # each costs a copy of the replica on every rank until it is written
PATIENCE = 2.0  # an evaluation or an epoch function may stand before a save in a rank's queue


@dataclass(slots=True)
class _Saving:
    """One save from its order to its end."""

    number: int
    edge: Edge
    reason: str
    writer: Rank
    awaited: set[Rank]
    since: Nanos  # waited for from here on, once `meta` is there
    files: dict[Rank, tuple[SavedFile, ...]] = field(default_factory=dict)
    meta: CheckpointMeta | None = None
    is_publishing: bool = False


class Saves:
    """All saves of one run."""

    def __init__(
        self,
        plan: Settled,
        roles: Roles,
        *,
        stand: Callable[[], CheckpointMeta],
        scored: Callable[[Round], tuple[Evaluation, ...]],
    ) -> None:
        """`stand` says where the training stands now; reason and ranks are filled in here.

        `scored` says what evaluations of states up to a round came to: they are ordered before the
        save of the same state, so their values are there when its parts are.
        """
        self._can_save = plan.can_save
        self._patience_ns = int(PATIENCE * plan.callback_timeout_s * 1e9)
        self._roles, self._stand, self._scored = roles, stand, scored
        self._due: set[str] = set()
        self._tried: set[Rank] = set()  # could not write the model, on this occasion
        self._open: dict[int, _Saving] = {}
        self._count = 0
        self._newest: Round | None = None  # the state of the newest save that has not failed

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def collecting(self) -> bool:
        """True while a save is due, or a rank's part of one is awaited: ranks must stay."""
        return bool(self._due) or bool(self._collecting())

    @property
    def pending(self) -> bool:
        """True while a save is on its way: the run must not end."""
        return bool(self._due or self._open)

    def _collecting(self) -> list[_Saving]:
        return [saving for saving in self._open.values() if not saving.is_publishing]

    def _forget(self, saving: _Saving) -> None:
        """Nothing came of it: the same state may be saved again."""
        self._open.pop(saving.number, None)
        if self._newest == saving.edge.after:
            self._newest = None

    # ---- order --------------------------------------------------------------------------------

    def wish(self, reason: str) -> None:
        """Somebody wants a save; it is ordered when `order` is asked next."""
        if self._can_save:
            self._due.add(reason)

    def close(self) -> None:
        """Ranks are let go: no wish can be met any more."""
        self._can_save = False

    def order(self, edge: Edge, now: Nanos, *, is_last: bool = False) -> Iterator[Action]:
        """Order the save that is due, if one is and there is room for it.

        `is_last`: no further round will be issued, so what cannot be saved now never can.
        """
        if not self._due:
            return
        if edge.after <= SPREADING:  # nothing worth a file
            if is_last:
                self._due.clear()
            return
        if edge.after == self._newest:
            self._due.clear()  # that very state is being saved, or was
            return
        if len(self._collecting()) >= MOST_COLLECTING:
            return
        writer, why = self._roles.holder("checkpoint", edge.living, edge.fastest, tried=self._tried)
        if writer is None:
            self._due.clear()
            self._tried.clear()
            yield Note("save", f"no checkpoint this time: {why}", alert=True)
            return
        if why:
            yield Note("roles", why)
        yield from self._send(edge, writer, now)

    def _send(self, edge: Edge, writer: Rank, now: Nanos) -> Iterator[Action]:
        self._count += 1
        reason = next(word for word in REASONS if word in self._due)
        self._due.clear()
        saving = _Saving(self._count, edge, reason, writer, set(edge.living), now)
        if edge.after == edge.committed:
            saving.meta = self._stand()
        self._open[saving.number] = saving
        self._newest = edge.after
        for rank in edge.living:
            yield Save(rank, saving.number, edge.after, edge.epoch, has_model=rank == writer)

    # ---- what becomes of them -----------------------------------------------------------------

    def committed(self, number: Round, now: Nanos) -> None:
        """The round is in the consensus, and no later one."""
        for saving in self._open.values():
            if saving.edge.after == number:
                saving.meta, saving.since = self._stand(), now

    def part(self, report: PartSaved) -> Iterator[Action]:
        """A rank has written its part, or could not. Raises PeerBroke on a save never ordered."""
        if not 0 < report.save <= self._count:
            raise PeerBroke(f"rank {report.rank} wrote a part of save {report.save}, never ordered")
        saving = self._open.get(report.save)
        if saving is None or report.rank not in saving.awaited:
            return  # dropped, or given up waiting for it
        if report.error:
            yield from self._without(saving, report.rank, report.error)
            return
        saving.awaited.discard(report.rank)
        saving.files[report.rank] = report.files
        if report.rank == saving.writer:
            self._tried.clear()

    def bury(self, rank: Rank) -> Iterator[Action]:
        """The rank is dead: no part of it will come any more."""
        for saving in list(self._open.values()):
            if rank not in saving.awaited:
                continue
            if rank == saving.writer:
                yield from self._fail(saving, f"rank {rank}, which wrote the model, is dead")
            else:
                saving.awaited.discard(rank)

    def _without(self, saving: _Saving, rank: Rank, error: str) -> Iterator[Action]:
        """A living rank's part will not be there."""
        if rank == saving.writer:
            self._tried.add(rank)
            yield from self._fail(saving, f"rank {rank} cannot write the model: {error}")
            return
        saving.awaited.discard(rank)
        text = f"rank {rank} cannot write its part of save {saving.number}: {error}"
        yield Note("save", f"{text}; the checkpoint goes without it", alert=True)

    def _fail(self, saving: _Saving, why: str) -> Iterator[Action]:
        self._forget(saving)
        self._due.add(saving.reason)
        yield DropSave(saving.number, why)
        yield Note("save", f"save {saving.number} is dropped: {why}", alert=True)

    def advance(self, now: Nanos) -> Iterator[Action]:
        """Give up what takes too long; publish what is complete, oldest first."""
        for saving in list(self._open.values()):
            if saving.meta is not None and now - saving.since > self._patience_ns:
                yield from self._give_up(saving)
        for saving in self._collecting():
            if saving.meta is not None and not saving.awaited:
                saving.is_publishing, saving.since = True, now
                yield self._publish(saving, saving.meta)

    def _publish(self, saving: _Saving, meta: CheckpointMeta) -> Publish:
        ranks = tuple(sorted(saving.files))
        meta = msgspec.structs.replace(
            meta,
            save_reason=saving.reason,
            ranks=ranks,
            evaluations=self._scored(saving.edge.after),
        )
        files = tuple(file for rank in ranks for file in saving.files[rank])
        return Publish(saving.number, meta, files)

    def _give_up(self, saving: _Saving) -> Iterator[Action]:
        late = f"no word of it for {self._patience_ns / 1e9:g} s"
        if saving.is_publishing:
            self._forget(saving)
            yield Note("save", f"save {saving.number} is given up: {late}", alert=True)
        elif saving.writer in saving.awaited:
            yield from self._without(saving, saving.writer, late)
        else:
            for rank in sorted(saving.awaited):
                yield from self._without(saving, rank, late)

    def published(self, event: Published) -> Iterator[Action]:
        """The shell has made a checkpoint visible, or could not."""
        saving = self._open.get(event.save)
        if saving is None:
            return  # given up waiting for it
        del self._open[event.save]
        if event.folder:
            yield Note("save", f"save {event.save} is {event.folder}")
        else:  # not tried again by itself: the disk is full for the next writer too
            self._forget(saving)
        if event.error:
            what = "checkpoints" if event.folder else f"save {event.save} cannot be published"
            yield Note("save", f"{what}: {event.error}", alert=True)
