"""Where a training stands, written down for a checkpoint, and taken up again from one.

The world may have another size, batches and windows another, the policy may be another one: what
is dealt anew each epoch fits any of them. The model, the data and their order must be the same.
Where the checkpoint lies, and how tensors come out of it, is not known here.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.checkpoint_meta import CheckpointMeta
from flodl_shm.control.messages import Attach, Note, Resumed
from flodl_shm.control.spans import length
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flodl_shm.control.epoch_function import EpochFunction
    from flodl_shm.control.messages import Action, Ready, Seat
    from flodl_shm.control.options import Settled
    from flodl_shm.control.reduce_cycle import ReduceCycle


class Resume(msgspec.Struct, frozen=True):
    """The checkpoint a run begins with; its files are verified by whoever read it."""

    folder: str
    meta: CheckpointMeta

    def state_of(self, rank: Rank) -> Rank | None:
        """Whose optimizer state the rank takes: its own, else one by turns; None: there is none."""
        ranks = self.meta.ranks
        if rank in ranks:
            return rank
        return Rank(ranks[rank % len(ranks)]) if ranks else None


def check(resume: Resume, ready: Ready, plan: Settled) -> None:
    """Refuse to go on with another model, other data or another order of it. Raises BadConfig."""
    meta = resume.meta
    difference = _model_difference(meta, ready)
    hint = "Build the model the checkpoint was made of, or start without --resume."
    if not difference:
        for name, past, here in (
            ("a dataset of {} samples", meta.samples, plan.samples),
            ("--augment {}", meta.augment, plan.augment),
            ("seed {}", meta.seed, plan.seed),
        ):
            if past != here:
                difference = f"it was made with {name.format(past)}, this run has {here}"
                hint = "What is done of an epoch is known by its order, which these decide."
                break
    if difference:
        raise BadConfig(f"the checkpoint {resume.folder} does not fit: {difference}", hint=hint)


def _model_difference(meta: CheckpointMeta, ready: Ready) -> str:
    if meta.digest == ready.digest:
        return ""
    for past, here in zip_longest(meta.names, ready.names, fillvalue="nothing"):
        if past != here:
            return f"its model has {past}, the script's has {here}"
    return f"its model's layout is {meta.digest[:12]}, the script's is {ready.digest[:12]}"


def take_up(resume: Resume, rounds: ReduceCycle) -> Iterator[Action]:
    """Give the balancer and the guard back what they had learned; say what goes on from where.

    What does not fit this run is left out with a word: it is learned again in a few windows.
    """
    meta, plan = resume.meta, rounds.plan
    yield Resumed(
        resume.folder, meta.global_step, meta.closed_epochs, where_it_goes_on(resume, plan)
    )
    if meta.epoch >= plan.epochs:
        done = f"{meta.epoch} epochs are done, {plan.epochs} are asked for"
        yield Note("resume", f"nothing is left to train: {done}", alert=True)
    changed = [
        f"{past} {what} then, {here} now"
        for what, past, here in (
            ("ranks", meta.world_size, plan.world_size),
            ("picks a batch", meta.batch_sizes, plan.batch_sizes),
        )
        if past != here
    ]
    if changed:
        yield Note("resume", f"speeds are measured afresh: {', '.join(changed)}")
    elif meta.el_che is not None:
        rounds.balance.restore(meta.el_che, keeps_length=meta.policy == plan.policy)
    if meta.world_size == plan.world_size and meta.guard is not None:
        rounds.guard.restore(msgspec.convert(meta.guard["recent"], tuple[float, ...]))


def stand(
    rounds: ReduceCycle, ready: Ready, rate: EpochFunction, resume: Resume | None
) -> CheckpointMeta:
    """Where the training stands with the round committed last; `ready` describes the model.

    Why it is saved, by whom and how it was scored is filled in when the checkpoint is published.
    """
    plan, schedule = rounds.plan, rounds.schedule
    begun = schedule.begun
    lr, lr_scale = rate.rate_of({*schedule.closed, *(epoch.epoch for epoch in begun)})
    return CheckpointMeta(
        save_reason="",
        epoch=schedule.lowest_open,
        epochs=plan.epochs,
        global_step=schedule.global_step,
        reduce=rounds.before + rounds.committed,
        world_size=plan.world_size,
        ranks=(),
        seed=plan.seed,
        policy=plan.policy,
        batch_sizes=plan.batch_sizes,
        samples=plan.samples,
        augment=plan.augment,
        tail=plan.tail,
        digest=ready.digest,
        names=ready.names,
        open_epochs=begun,
        closed_epochs=tuple(schedule.closed[number] for number in sorted(schedule.closed)),
        el_che=rounds.balance.to_state(),
        guard={"recent": rounds.guard.to_state()},
        lr=lr,
        lr_scale=lr_scale,
    )


def attachments(resume: Resume | None, plan: Settled, seats: tuple[Seat, ...]) -> Iterator[Attach]:
    """The places in the arena of all who begin, and the state they begin from."""
    for seat in seats:
        yield Attach(
            rank=seat.rank,
            plan=plan,
            slot=seat.slot,
            seats=seats,
            global_step=resume.meta.global_step if resume else 0,
            checkpoint=resume.folder if resume else "",
            state_of=resume.state_of(seat.rank) if resume else None,
            version=resume.meta.reduce if resume else 0,
        )


def where_it_goes_on(resume: Resume, plan: Settled) -> str:
    """Where the training goes on, in a sentence."""
    meta = resume.meta
    said = f"goes on from {resume.folder}: epoch {meta.epoch} of {plan.epochs}"
    if meta.epochs != plan.epochs:  # a schedule made of the total is another one now
        said += f" ({meta.epochs} were planned)"
    for begun in meta.open_epochs:
        said += f", {length(begun.done)} of its {begun.picks} picks done"
    return f"{said}, step {meta.global_step}"
