"""At a batch boundary: does this rank take another batch in this window?

One function, asked by real ranks and by the simulator's. The anchor rank does its steps; others
start another batch only while half of it fits before the anchor rank's predicted end, never
beyond their ceiling. Exact windows are counted, and so is a window whose anchor rank died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.pace import predicted_end, starts_another

if TYPE_CHECKING:
    from flodl_shm.control.messages import Grant
    from flodl_shm.ids import Nanos


@dataclass(frozen=True, slots=True)
class AnchorView:
    """The anchor rank as its cells show it."""

    alive: bool
    done: int  # steps of this very round
    last: Nanos  # when the newest of them (or the last reduce) ended
    pace_ns: int  # its mean batch time; 0 while unknown


def takes_another(
    grant: Grant, *, done: int, now: Nanos, own_ns: int, anchor_view: AnchorView | None
) -> bool:
    """True if a rank that has done `done` batches of the window shall do one more.

    `own_ns` is its own mean batch time; `anchor_view` is None on the anchor rank itself.
    """
    if done >= grant.ceiling:
        return False
    if anchor_view is None:
        return done < grant.anchor_steps
    if grant.planned == grant.ceiling or not anchor_view.alive:
        return done < grant.planned
    if done == 0:
        return True  # every rank with picks contributes to every window
    if anchor_view.done >= grant.anchor_steps:
        return False
    end = predicted_end(
        last_ns=anchor_view.last,
        done=anchor_view.done,
        anchor_steps=grant.anchor_steps,
        pace_ns=anchor_view.pace_ns,
        now=now,
    )
    return starts_another(now=now, own_ns=own_ns, anchor_end=end)
