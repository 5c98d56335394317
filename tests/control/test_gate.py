"""Each policy's gate: when a round may be issued, and why not."""

from __future__ import annotations

import msgspec
import pytest

from flodl_shm.control.gate import SYNC_DEPTH, Gate, View, cadence, sync

CALM = View(
    unsettled=0,
    newest_exact=False,
    undealt=100,
    unused=0,
    early_need=10,
    window=20,
    calibrated=True,
    epochs_left=True,
)


def view(**changes: object) -> View:
    return View(**{**{f: getattr(CALM, f) for f in CALM.__slots__}, **changes})  # type: ignore[arg-type]


def test_the_view_is_plain_data() -> None:
    assert msgspec.to_builtins(CALM)["undealt"] == 100


@pytest.mark.parametrize(
    ("changes", "want", "words"),
    [
        ({}, Gate.EXACT, "100 picks undone"),
        ({"undealt": 0, "unused": 4}, Gate.EXACT, "4 picks undone"),
        ({"undealt": 0}, Gate.NEXT_EPOCH, "settled round"),
        ({"undealt": 0, "epochs_left": False}, Gate.HOLD, "no epoch is left"),
        ({"unsettled": 1}, Gate.EARLY, "10 needed ahead"),
        ({"unsettled": 2}, Gate.HOLD, "2 rounds are under way"),
        ({"unsettled": 1, "calibrated": False}, Gate.HOLD, "timed"),
        ({"unsettled": 1, "newest_exact": True}, Gate.HOLD, "may end the epoch"),
        ({"unsettled": 1, "undealt": 49}, Gate.HOLD, "49 undealt picks are too few"),
    ],
)
def test_cadence(changes: dict[str, object], want: Gate, words: str) -> None:
    verdict, reason = cadence(view(**changes))
    assert verdict is want
    assert words in reason


@pytest.mark.parametrize(
    ("changes", "want", "words"),
    [
        ({}, Gate.EXACT, "100 picks undealt"),
        ({"unsettled": SYNC_DEPTH}, Gate.HOLD, "under way"),
        ({"undealt": 0, "unsettled": 1}, Gate.HOLD, "in flight"),
        ({"undealt": 0, "unused": 1, "unsettled": 1}, Gate.HOLD, "in flight"),
        ({"undealt": 0, "unused": 1}, Gate.EXACT, "1 picks were left untrained"),
        ({"undealt": 0}, Gate.NEXT_EPOCH, "settled round"),
        ({"undealt": 0, "epochs_left": False}, Gate.HOLD, "no epoch is left"),
    ],
)
def test_sync(changes: dict[str, object], want: Gate, words: str) -> None:
    verdict, reason = sync(view(**changes))
    assert verdict is want
    assert words in reason
