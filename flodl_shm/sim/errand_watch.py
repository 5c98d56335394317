"""Watches what is done besides training in a simulated run: epoch functions, saves, rates.

Told every order and event as the world carries it out; raises WeBroke when a promise is broken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    Action,
    CallbackRan,
    CallEpochFn,
    Died,
    DropSave,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Grant,
    PartSaved,
    Publish,
    Published,
    Rejoined,
    Save,
)
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank, Round

if TYPE_CHECKING:
    from flodl_shm.sim.books import Books

Rate = tuple[float | None, float]
Life = tuple[Rank, int]  # which incarnation of a rank


@dataclass(slots=True)
class ErrandWatch:
    """`has_epoch_fn`: each epoch but `called_before` must be begun by its function."""

    has_epoch_fn: bool
    called_before: int | None = None
    named: Rank | None = None  # nobody else may have the role
    lives: dict[Rank, int] = field(default_factory=dict)  # incarnations after the first
    buried: set[Life] = field(default_factory=set)
    calls: dict[int, list[Life]] = field(default_factory=lambda: defaultdict(list))
    returned: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)  # epochs with a window
    hanging: set[int] = field(default_factory=set)  # saves something of which is never answered
    saves: dict[int, Save] = field(default_factory=dict)  # ordered and not answered yet
    parts: dict[int, dict[Rank, PartSaved]] = field(default_factory=lambda: defaultdict(dict))
    publishing: set[int] = field(default_factory=set)
    rates: dict[Round, Rate] = field(default_factory=dict)
    value: float | None = None  # the newest that came
    told: dict[Rank, float | None] = field(default_factory=dict)  # the newest value each was told

    def event(self, event: Event) -> None:
        """The coordinator takes this."""
        match event:
            case Died():
                self.buried.add(self._life(event.rank))
            case CallbackRan(role="epoch"):
                self.returned.add(event.epoch)
            case PartSaved():
                self.parts[event.save][event.rank] = event
            case Published():
                self.saves.pop(event.save, None)
            case Evaluated():
                self.value = event.value
            case _:
                pass

    def _life(self, rank: Rank) -> Life:
        return rank, self.lives.get(rank, 0)

    def action(self, action: Action, books: Books) -> None:
        """The coordinator has decided this."""
        match action:
            case Rejoined():
                self.lives[action.rank] = action.incarnation
                self.told[action.rank] = self.value
            case CallEpochFn() | Evaluate() | Save() if self._life(action.rank) in self.buried:
                raise WeBroke(f"{action} goes to a dead rank")
            case CallEpochFn():
                self._called(action)
            case Grant() if action.round > 1:
                self._granted(action)
            case Save():
                if self.saves.setdefault(action.save, action).after != action.after:
                    raise WeBroke(f"save {action.save} is of two states")
            case Publish():
                self._published(action, books)
            case DropSave():
                del self.saves[action.save]
            case EpochMetrics() if action.value is not None:
                self.told[action.rank] = action.value
            case Finish():
                self._finishes(action)
            case _:
                pass

    def _called(self, order: CallEpochFn) -> None:
        before = self.calls[order.epoch]
        if not set(before) <= self.buried or order.epoch in self.returned:
            raise WeBroke(f"epoch {order.epoch} is begun by {order.rank} after {before}")
        before.append(self._life(order.rank))

    def _granted(self, grant: Grant) -> None:
        wants = self.has_epoch_fn and grant.epoch not in {self.called_before, *self.begun}
        self.begun.add(grant.epoch)
        is_gone = self.named is not None and self._life(self.named) in self.buried
        if wants and not is_gone and grant.epoch not in self.returned:
            raise WeBroke(f"epoch {grant.epoch} begins before its function has returned")

    def _finishes(self, order: Finish) -> None:
        if late := self.saves.keys() - self.publishing - self.hanging:
            raise WeBroke(f"rank {order.rank} finishes before its parts of {sorted(late)} are in")
        if order.status == "ok" and self.told.get(order.rank) != self.value:
            raise WeBroke(f"rank {order.rank} finishes without the final value")

    def _published(self, action: Publish, books: Books) -> None:
        order = self.saves[action.save]
        self.publishing.add(action.save)
        books.check_meta(action.meta, order.after)
        parts = self.parts[action.save]
        files = [file for rank in action.meta.ranks for file in parts[Rank(rank)].files]
        if files != list(action.files) or [file.name for file in files].count("model") != 1:
            raise WeBroke(f"save {action.save} is published with {action.files}, written {files}")
        if any(file.sha256 != str(order.after) for file in files):
            raise WeBroke(f"save {action.save} is of the state after {order.after}: {files}")

    def trains_at(self, number: Round, rate: Rate) -> None:
        """A rank begins its window of a round at this rate: all ranks train at the same."""
        if self.rates.setdefault(number, rate) != rate:
            raise WeBroke(f"round {number} is trained at {rate} and at {self.rates[number]}")

    def check_end(self) -> None:
        """The run ends well: every save is published, failed or dropped."""
        if self.saves.keys() - self.hanging:
            raise WeBroke(f"the run ends before saves {sorted(self.saves)} are")
