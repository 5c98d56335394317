"""Tells the scripts on all ranks how epochs went: once when one closes, once with its value.

One rank of them is told to call the metrics function, if a rank is to: the lowest living one.
An evaluation in the middle of an epoch is told with what there is of the epoch by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.epoch_metrics import EpochTally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flodl_shm.control.messages import EpochClosed, EpochMetrics
    from flodl_shm.control.options import Settled
    from flodl_shm.control.reduce_cycle import Living
    from flodl_shm.control.roles import Roles
    from flodl_shm.control.schedule import Schedule
    from flodl_shm.ids import Nanos


KEPT = 4  # epochs whose figures wait for a value; a later one is told with the bare facts


class EpochNews:
    """What is told of the epochs of `schedule`; `devices` are by rank."""

    def __init__(
        self, plan: Settled, roles: Roles, schedule: Schedule, devices: Sequence[str]
    ) -> None:
        self._plan, self._roles, self._schedule = plan, roles, schedule
        self._devices = tuple(devices)
        self._told: dict[int, EpochMetrics] = {}

    def closed(self, epoch: EpochClosed, living: Living, now: Nanos) -> Iterator[EpochMetrics]:
        """An epoch is in the consensus."""
        tally = self._schedule.tallies.pop(epoch.epoch, EpochTally())
        news = tally.build(epoch.epoch, epoch.loss, epoch.picks, devices=self._devices, at=now)
        self._told[epoch.epoch] = news
        self._told.pop(epoch.epoch - KEPT, None)
        yield from self._to_all(news, living)

    def scored(
        self, epoch: int, value: float, living: Living, now: Nanos
    ) -> Iterator[EpochMetrics]:
        """An epoch's consensus was evaluated; closed in this run, before a resume, or open yet."""
        news = self._told.get(epoch)
        is_closed = news is not None or epoch in self._schedule.closed
        if news is None and is_closed:
            past = self._schedule.closed[epoch]
            news = EpochTally().build(epoch, past.loss, past.picks, devices=self._devices, at=now)
        elif news is None:
            begun = self._schedule.epochs[epoch]  # only what was issued is scored
            tally = self._schedule.tallies[epoch]
            news = tally.build(epoch, begun.loss, begun.pool.done, devices=self._devices, at=now)
        news = msgspec.structs.replace(news, value=value, closed=is_closed)
        yield from self._to_all(news, living)

    def _to_all(self, news: EpochMetrics, living: Living) -> Iterator[EpochMetrics]:
        caller = None
        if self._plan.metrics_on_rank and news.closed:
            caller, _ = self._roles.holder("metrics", living, lambda: min(living))
        for rank in living:
            yield msgspec.structs.replace(news, rank=rank, calls=rank == caller)
