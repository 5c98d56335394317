"""What an epoch function gets beside the epoch: where its rank stands, and the learning rate.

Everything read is of the rank it runs on. The rate is for all: it travels to the coordinator, and
from there to every rank before the epoch's first step, so which rank was asked does not matter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from flodl_shm.errors import BadConfig
from flodl_shm.train.lr import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.ids import Rank


class RankFacts(Protocol):
    """What a handle asks of the worker it stands for."""

    @property
    def rank(self) -> Rank: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def current_lr(self) -> float:
        """Of the first parameter group."""

    @property
    def local_step(self) -> int:
        """Optimizer steps of this rank's process."""

    @property
    def current_epoch(self) -> int: ...

    @property
    def current_version(self) -> int:
        """Rounds gone through: each makes a new version of the consensus."""

    @property
    def latest_metrics(self) -> EpochMetrics | None: ...


class EpochHandle:
    """The second argument of `epoch_fn(epoch, worker)`. It may ask for a rate until it returns.

    For the worker: `wanted` is (learning rate or None, factor of the rate), `scheduler` a function
    of the global step to follow from here on, or None.
    """

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        self._is_open = True
        self.wanted: tuple[float | None, float] = (None, 1.0)
        self.scheduler: Callable[[int], float] | None = None

    @property
    def rank(self) -> Rank:
        """Of the rank that runs this function: one of them, which may change."""
        return self._facts.rank

    @property
    def world_size(self) -> int:
        """Ranks the training began with."""
        return self._facts.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's model is."""
        return self._facts.device

    @property
    def model(self) -> nn.Module:
        """This rank's replica, which holds the consensus; the others do not see it changed."""
        return self._facts.model

    @property
    def current_lr(self) -> float:
        """The learning rate, what this function has asked for included."""
        lr, scale = self.wanted
        return (self._facts.current_lr if lr is None else lr) * scale

    @property
    def local_step(self) -> int:
        """Optimizer steps of this rank's process so far."""
        return self._facts.local_step

    @property
    def current_epoch(self) -> int:
        """The epoch that is about to begin."""
        return self._facts.current_epoch

    @property
    def current_version(self) -> int:
        """Rounds of the training, before a resume too: each makes a new version of the model."""
        return self._facts.current_version

    @property
    def latest_metrics(self) -> EpochMetrics | None:
        """Of the last epoch this rank was told of; None before the first."""
        return self._facts.latest_metrics

    def set_lr(self, lr: float) -> None:
        """Make this the learning rate of every rank, from this epoch's first step on.

        It stays until it is changed again; a schedule is no longer followed. Raises BadConfig.
        """
        self.wanted = (self._checked("set_lr", lr), 1.0)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate of every rank, from this epoch's first step on.

        With a schedule, all that it gives from here on. Factors of several calls, and of several
        epochs, multiply. Raises BadConfig.
        """
        lr, scale = self.wanted
        self.wanted = (lr, scale * self._checked("scale_lr", factor))

    def set_scheduler(self, scheduler: Callable[[int], float]) -> None:
        """Follow another function of the global step from here on. Of a run of one rank only.

        Functions do not travel, so the other ranks could not follow it. Raises BadConfig.
        """
        self._check_open("set_scheduler")
        if self.world_size > 1:
            raise BadConfig(
                f"set_scheduler would change the schedule of one rank of {self.world_size}",
                hint="Give scheduler= to Trainer, which every rank follows, or use set_lr.",
            )
        if kind_of(scheduler) != "of_step":
            raise BadConfig(
                "set_scheduler takes a function of the global step alone",
                hint="Give a factory as scheduler= to Trainer.",
            )
        self.scheduler = scheduler

    def close(self, *, keep: bool) -> None:
        """The function has returned; `keep`: what it asked for counts, as it has not failed."""
        self._is_open = False
        if not keep:
            self.wanted, self.scheduler = (None, 1.0), None

    def _checked(self, method: str, value: object) -> float:
        self._check_open(method)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadConfig(f"{method} got {value!r}", hint="Give a number, at least 0.")
        if not (math.isfinite(value) and value >= 0):
            raise BadConfig(f"{method} got {value:g}", hint="It must be finite and at least 0.")
        return float(value)

    def _check_open(self, method: str) -> None:
        if not self._is_open:
            raise BadConfig(
                f"{method} was called after the epoch function had returned",
                hint="Call it in the function: it holds from that epoch's first step on.",
            )
