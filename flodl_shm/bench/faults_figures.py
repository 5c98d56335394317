"""From a run's journal, and what was done to its ranks, to the figures of bench-faults.

Times are of one clock: the striker's, the launcher's and the ranks'. A window is as long as the
median of the last five before the blow. Possible is what the living ranks would have trained at
the rates of their free run; a rank lives from its first step to the blow, and again as soon as
its new process has built the model, so all that a return takes from there on counts as lost.
Pure: records in, figures out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    Arrived,
    Attached,
    Committed,
    Died,
    Left,
    Ready,
    Spawn,
)
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round
from flodl_shm.obs.journal import Header, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flodl_shm.bench.striker import Struck

WARM = 4  # commits until the balancer knows the ranks: goodput counts from there
GAPS = 5  # windows before a blow that say how long one is
LATER = 3  # windows after a death from which on the others must be efficient again


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What followed one blow; None where there is no such thing."""

    detected_ns: int | None = None  # until the launcher told the coordinator of it
    gone_ns: int | None = None  # of that: until the kernel was done with the process
    out_ns: int | None = None  # until the last survivor left the reduce it fell into
    next_commit_windows: float | None = None
    rejoin_windows: float | None = None  # until a commit had a contribution of the rank again
    start_ns: int | None = None  # from the order for a new process to its model
    lost_picks: float | None = None  # trained since its last reduce and in no consensus
    picks_later: int = 0  # from three windows after it to the next blow: trained,
    ideal_later: float = 0.0  # and possible


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """One run."""

    aftermaths: tuple[Aftermath, ...]
    goodput: float  # picks in the consensus over those possible, from the calibrated windows on
    rates: tuple[float, ...]


@dataclass(slots=True)
class _Heard:
    rates: dict[Rank, float] = field(default_factory=dict)
    commits: list[tuple[Nanos, Committed]] = field(default_factory=list)
    arrived: list[tuple[Nanos, Arrived]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    died: list[tuple[Nanos, Died]] = field(default_factory=list)
    spawned: list[tuple[Nanos, Spawn]] = field(default_factory=list)
    ready: list[tuple[Nanos, Ready]] = field(default_factory=list)


def measure(records: Iterable[Header | Record], blows: Sequence[Struck]) -> FaultFigures:
    """The figures of one run. Raises WeBroke for a journal without a free run or windows."""
    heard = _listen(records)
    if not heard.rates or not all(heard.rates.values()):
        raise WeBroke(f"no free run in the journal: rates are {heard.rates}")
    if len(heard.commits) <= WARM:
        raise WeBroke(f"{len(heard.commits)} windows in the journal, too few to measure")
    ends = [blow.at for blow in blows[1:]] + [heard.commits[-1][0]]
    return FaultFigures(
        tuple(_after(heard, blows, blow, Nanos(end)) for blow, end in zip(blows, ends, strict=True))
        if blows
        else (),
        _goodput(heard, blows),
        tuple(heard.rates[rank] for rank in sorted(heard.rates)),
    )


def _listen(records: Iterable[Header | Record]) -> _Heard:
    heard = _Heard()
    for record in records:
        if isinstance(record, Header):
            continue
        match record.message:
            case Attached() as attached:
                heard.rates.setdefault(attached.rank, attached.free_picks_per_s)
            case Committed() as commit:
                heard.commits.append((record.at, commit))
            case Arrived() as arrived:
                heard.arrived.append((record.at, arrived))
            case Left() as left:
                heard.left.append(left)
            case Died() as died:
                heard.died.append((record.at, died))
            case Spawn() as spawn:
                heard.spawned.append((record.at, spawn))
            case Ready() as ready:
                heard.ready.append((record.at, ready))
            case _:
                pass
    return heard


# ---- one blow ----------------------------------------------------------------------------------


def _after(heard: _Heard, blows: Sequence[Struck], blow: Struck, end: Nanos) -> Aftermath:
    at, rank = blow.at, blow.rank
    window_ns = _window_ns(heard, at)
    newer = [(when, commit) for when, commit in heard.commits if when > at]
    found = _death(heard, blow)
    if found is None:  # the rank lives: its numbers were refused, or it was only paused
        refused = (w for w, one in heard.arrived if w > at and one.rank == rank and one.refused)
        seen = next(refused, None)
        return Aftermath(
            detected_ns=None if seen is None else seen - at,
            next_commit_windows=(newer[0][0] - at) / window_ns if newer else None,
        )
    died_at, died = found
    back_at = _back_at(heard, died, newer)
    picks, ideal = _later(heard, blows, newer, end)
    return Aftermath(
        detected_ns=died_at - at,
        gone_ns=None if blow.gone_at is None else blow.gone_at - at,
        out_ns=_out_ns(heard, blow),
        next_commit_windows=(newer[0][0] - at) / window_ns if newer else None,
        rejoin_windows=None if back_at is None else (back_at - at) / window_ns,
        start_ns=_start_ns(heard, blow),
        lost_picks=_lost(heard, died, at),
        picks_later=picks,
        ideal_later=ideal,
    )


def _window_ns(heard: _Heard, at: Nanos) -> float:
    ends = [when for when, _ in heard.commits if when <= at][-GAPS - 1 :]
    gaps = [later - sooner for sooner, later in pairwise(ends)]
    if not gaps:
        raise WeBroke("a blow fell before there were two windows")
    return statistics.median(gaps)


def _death(heard: _Heard, blow: Struck) -> tuple[Nanos, Died] | None:
    told = ((when, died) for when, died in heard.died if when >= blow.at)
    return next(((when, died) for when, died in told if died.rank == blow.rank), None)


def _out_ns(heard: _Heard, blow: Struck) -> int | None:
    """None for a blow outside of a reduce: the window's end is no part of getting out of it."""
    inside = _round_under_way(heard, blow.at)
    if inside is None:
        return None
    return max(one.left_at for one in heard.left if one.round == inside) - blow.at


def _round_under_way(heard: _Heard, at: Nanos) -> Round | None:
    """The round everybody had arrived in and somebody had still to leave."""
    for number in sorted({one.round for one in heard.left if one.left_at > at}):
        came = [when for when, one in heard.arrived if one.round == number]
        return number if came and max(came) <= at else None
    return None


def _start_ns(heard: _Heard, blow: Struck) -> int | None:
    for when, spawn in heard.spawned:
        if when > blow.at and spawn.rank == blow.rank:
            told = (w for w, one in heard.ready if (one.rank, one.row) == (spawn.rank, spawn.row))
            ready_at = next(told, None)
            return None if ready_at is None else ready_at - when
    return None


def _back_at(heard: _Heard, died: Died, newer: Sequence[tuple[Nanos, Committed]]) -> Nanos | None:
    """The first commit with work of a later incarnation."""
    rounds = {one.round for _, one in heard.arrived if one.rank == died.rank and one.row > died.row}
    for when, commit in newer:
        if commit.round in rounds and died.rank in commit.contributors:
            return when
    return None


def _lost(heard: _Heard, died: Died, at: Nanos) -> float:
    """By the rank's own rate: the picks of a window that was never told of are not counted."""
    left = [one for one in heard.left if one.row == died.row]
    if not left or died.arrived > left[-1].round:
        return 0.0  # its window is in the consensus
    return max(0.0, (at - left[-1].left_at) / 1e9 * heard.rates[died.rank])


def _later(
    heard: _Heard,
    blows: Sequence[Struck],
    newer: Sequence[tuple[Nanos, Committed]],
    end: Nanos,
) -> tuple[int, float]:
    """Trained and possible from three windows after a blow to the last commit before the next."""
    steady = [(when, commit) for when, commit in newer if when <= end][LATER - 1 :]
    if len(steady) < 2:
        return 0, 0.0
    start, stop = steady[0][0], steady[-1][0]
    picks = sum(sum(commit.picks.values()) for _, commit in steady[1:])
    return picks, _possible(heard, blows, start, stop)


# ---- what was possible -------------------------------------------------------------------------


def _goodput(heard: _Heard, blows: Sequence[Struck]) -> float:
    start, stop = heard.commits[WARM - 1][0], heard.commits[-1][0]
    picks = sum(sum(commit.picks.values()) for _, commit in heard.commits[WARM:])
    return picks / _possible(heard, blows, start, stop)


def _possible(heard: _Heard, blows: Sequence[Struck], start: Nanos, stop: Nanos) -> float:
    """Picks of all ranks at their own rates while they lived, between two moments."""
    total = 0.0
    for rank, rate in heard.rates.items():
        for since, to in _lives(heard, blows, rank, stop):
            total += rate * max(0, to - max(start, since)) / 1e9
    return total


def _lives(
    heard: _Heard, blows: Sequence[Struck], rank: Rank, stop: Nanos
) -> Iterator[tuple[int, int]]:
    """From when to when each process of the rank could train, up to `stop`."""
    born = {one.row: when for when, one in heard.ready if one.rank == rank}
    for when, died in heard.died:
        if died.rank != rank or died.row not in born:
            continue  # lost on its way, before it could do anything
        since = born.pop(died.row)
        struck = (blow.at for blow in blows if blow.rank == rank and since < blow.at <= when)
        yield since, min(stop, max(struck, default=when))
    for since in born.values():
        yield since, stop
