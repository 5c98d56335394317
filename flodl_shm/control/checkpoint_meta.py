"""What a checkpoint says of itself: `meta.json`, all of it plain values.

Everything a run needs to go on where another one stopped, but for tensors and random states: those
are in the ranks' own files. Fields that an older version did not write have defaults.
"""

from __future__ import annotations

import msgspec

from flodl_shm.control.message import Message, Span

SCHEMA = 1


class EpochClosed(Message, frozen=True):
    """Every dealt pick of the epoch is in the consensus."""

    epoch: int
    picks: int
    done_once: int
    duplicated: int
    missing: int
    dropped: int
    loss: float | None


class SavedFile(msgspec.Struct, frozen=True):
    """One durable file of a checkpoint, named within its folder."""

    name: str
    bytes: int
    sha256: str


class OpenEpoch(msgspec.Struct, frozen=True):
    """An epoch of which some picks are not in the consensus yet."""

    epoch: int
    picks: int  # dealt in it, dropped ones not counted
    dropped: int
    done: tuple[Span, ...]  # positions of its order that are in the consensus
    loss_sum: float
    loss_count: int


class Evaluation(msgspec.Struct, frozen=True):
    """One value of the evaluation function."""

    epoch: int
    value: float


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training stands. Written once, before the manifest."""

    schema: int = SCHEMA
    save_reason: (
        str  # checkpoint | request | signal | graceful_shutdown | end | max_failure_exceeded
    )
    epoch: int  # the lowest one that is not closed; the number of epochs when all are
    epochs: int
    global_step: int
    reduce: int  # rounds since the beginning of the whole training
    world_size: int
    ranks: tuple[int, ...]  # those whose optimizer and random state is here
    seed: int
    policy: str
    batch_sizes: tuple[int, ...]
    samples: int
    augment: int
    tail: str
    digest: str  # of the model's layout
    names: tuple[str, ...]  # a few words per tensor, to name the first difference
    open_epochs: tuple[OpenEpoch, ...] = ()
    closed_epochs: tuple[EpochClosed, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    el_che: dict[str, object] | None = None
    guard: dict[str, object] | None = None
    lr: float | None = None  # as the script last set it; None: the schedule's
    lr_scale: float = 1.0
