"""Steps a journal again and compares: the same events must give the same actions.

    event    stepped by a fresh coordinator; what it decides is awaited
    action   must be the next of what is awaited
    note     the launcher's own remark; the coordinator never saw it

A journal may end anywhere, since a kill ends it: what is awaited then was decided and not yet
written. Messages are compared as they are written, so a NaN equals itself. The coordinator is
given; nothing here touches a file or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.messages import End

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flodl_shm.control.messages import Action, Event
    from flodl_shm.ids import Nanos
    from flodl_shm.obs.journal import Record

    Step = Callable[[Event, Nanos], list[Action]]

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where recording and replay part. Texts are messages as the journal writes them."""

    index: int  # of the record, the first after the header is 0: line `index` + 2
    at: Nanos
    expected: str  # as recorded
    got: str  # as stepped now
    event: str  # the last one that was stepped


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it. `is_complete`: the recording reaches the run's end."""

    events: int
    actions: int
    is_complete: bool
    difference: Difference | None = None


def replay(records: Iterable[Record], step: Step) -> Verdict:
    """Feed every event to `step` and compare what it returns with the actions that follow it."""
    events = actions = 0
    is_complete = False
    awaited: list[str] = []
    event = NOTHING
    for index, record in enumerate(records):
        is_complete = is_complete or isinstance(record.message, End)
        if record.kind == "note":
            continue
        text = written(record.message)
        expected = text if record.kind == "action" else NOTHING
        got = awaited.pop(0) if awaited else NOTHING
        if got != expected:
            parted = Difference(index, record.at, expected, got, event)
            return Verdict(events, actions, is_complete, parted)
        if record.kind == "action":
            actions += 1
            continue
        event, events = text, events + 1
        awaited = _decided(step, record)
    return Verdict(events, actions, is_complete)


def written(message: Event | Action) -> str:
    """The message as a line of the journal holds it."""
    return msgspec.json.encode(message).decode()


def _decided(step: Step, record: Record) -> list[str]:
    """The actions, or in their place what the coordinator choked on: a recorded run did not."""
    try:
        # Only events are stepped; a union of both is what a record can hold.
        return [written(action) for action in step(record.message, record.at)]  # type: ignore[arg-type]
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
