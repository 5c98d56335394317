"""When a round is issued, and who is held: one function per policy.

A round must be named before any rank can reach it, and its picks must be certain to be in nobody
else's hands. With nothing in flight both are plain (EXACT). While one window is under way the
next can be issued on top of it (EARLY), so that ranks go from one consensus straight to the next
batch, as long as the epoch has enough undealt picks to cover the worst case of both windows.
Never gated on wall time: a time gate that feeds on samples which only arrive when it opens
locks itself up (floDl, firing gate).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SYNC_DEPTH = 4  # rounds a sync rank may know ahead: their picks do not depend on timing


class Gate(Enum):
    """What the coordinator may do now."""

    HOLD = "hold"
    EXACT = "exact"
    EARLY = "early"
    NEXT_EPOCH = "next epoch"


@dataclass(frozen=True, slots=True)
class View:
    """What a gate looks at, in picks."""

    unsettled: int  # rounds issued whose contributors are not certain
    newest_exact: bool  # the newest of them has exact counts: the epoch may end with it
    undealt: int  # in nobody's hands
    unused: int  # in hands, given back if nothing is in flight
    early_need: int  # what issuing on top of the window under way would take
    window: int  # one window of all ranks, as believed
    calibrated: bool
    epochs_left: bool


def sync(view: View) -> tuple[Gate, str]:
    """Every rank steps once a round: the deal is known ahead, up to the end of the epoch."""
    if view.unsettled >= SYNC_DEPTH:
        return Gate.HOLD, f"{view.unsettled} rounds are under way"
    if view.undealt:
        return Gate.EXACT, f"{view.undealt} picks undealt"
    if view.unused and not view.unsettled:
        return Gate.EXACT, f"{view.unused} picks were left untrained, none in flight"
    return _epoch_edge(view)


def cadence(view: View) -> tuple[Gate, str]:
    """Elastic windows: one under way and, where the epoch allows it, one issued on top."""
    if view.unsettled == 0:
        if view.undealt + view.unused:
            return Gate.EXACT, f"{view.undealt + view.unused} picks undone, none in flight"
        return _epoch_edge(view)
    if view.unsettled > 1:
        return Gate.HOLD, f"{view.unsettled} rounds are under way"
    if not view.calibrated:
        return Gate.HOLD, "no rank has been timed yet"
    if view.newest_exact:
        return Gate.HOLD, "the window under way may end the epoch"
    if view.undealt - view.early_need < 2 * view.window:
        return Gate.HOLD, f"{view.undealt} undealt picks are too few to deal ahead"
    return Gate.EARLY, f"{view.undealt} picks undealt, {view.early_need} needed ahead"


def _epoch_edge(view: View) -> tuple[Gate, str]:
    """All picks are dealt: the next epoch opens once no death can bring one back."""
    if view.unsettled:
        return Gate.HOLD, "the epoch's last picks are in flight"
    if view.epochs_left:
        return Gate.NEXT_EPOCH, "every pick of the epoch is in a settled round"
    return Gate.HOLD, "no epoch is left"
