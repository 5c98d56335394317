"""From a run's journal to the efficiency of its rig: the definition, in one place.

Ideal is what the ranks would train in the same time at the rates they had in their free run, all
at once and with nobody to meet. Where a rank is slowed, the wait that does it is added to what a
pick took it in the free run, so a rig whose speeds change is measured against what it could do
then. (The factor alone would also slow what lies between steps.) What counts as trained is what a
commit has put into the consensus. Pure: records in, figures out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flodl_shm.control.messages import Arrived, Attached, Committed, Issued
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round
from flodl_shm.obs.journal import Header, Record

Slowness = Callable[[Rank, int], float]  # (rank, epoch) -> seconds a pick takes longer
RECOVERED = 0.9  # of the steady he: a window that reaches it follows the new speeds


@dataclass(frozen=True, slots=True)
class RigFigures:
    """One run. All but `he_whole` and `rates` is of the calibrated part, commit to commit.

    `he`: picks over the ideal. `vs_fastest`: over what the fastest rank alone would do.
    `sync_bound`: what ranks of these rates that meet after every batch can reach at best.
    """

    he: float
    he_whole: float  # from the first step of all ranks, calibration included
    vs_fastest: float
    sync_bound: float
    picks_per_s: float
    windows: int
    picks: int
    rates: tuple[float, ...]  # free picks per second, by rank
    windows_to_recover: int | None = None  # from a change on, the first good one; 1: no loss


@dataclass(slots=True)
class _Heard:
    """What the figures are made of, in order."""

    rates: dict[Rank, float] = field(default_factory=dict)
    began: dict[Rank, Nanos] = field(default_factory=dict)  # each rank's first step
    commits: list[tuple[Nanos, Committed]] = field(default_factory=list)
    probe: Round | None = None  # the first round with steps: nobody's speed was known
    awaited: set[str] = field(default_factory=set)  # ranks that have not ended the probe
    calibrated: Round | None = None  # the first one issued after it


def measure(
    records: Iterable[Header | Record], slowness: Slowness, *, changed_at: int | None = None
) -> RigFigures:
    """The figures of one finished run. Raises WeBroke for a journal without a free run or windows.

    Calibrated is the first round that was issued after every rank had ended the first window;
    its window begins when the round before it commits. `changed_at` is the epoch in which a
    rank's speed changes for good.
    """
    heard = _listen(records)
    if not heard.rates or not all(heard.rates.values()):
        raise WeBroke(f"no free run in the journal: rates are {heard.rates}")
    starts = [at for at, c in heard.commits if c.round < (heard.calibrated or 0)]
    if not starts or not heard.began:
        raise WeBroke("no calibrated window in the journal")
    steady = _Span(heard.commits, max(starts), heard.rates, slowness)
    whole = _Span(heard.commits, Nanos(max(heard.began.values())), heard.rates, slowness)
    if not steady.ns:
        raise WeBroke("nothing was committed after the first calibrated window began")
    return RigFigures(
        he=steady.picks / steady.ideal(sum),
        he_whole=whole.picks / whole.ideal(sum),
        vs_fastest=steady.picks / steady.ideal(max),
        sync_bound=len(heard.rates) * steady.ideal(min) / steady.ideal(sum),
        picks_per_s=steady.picks / (steady.ns / 1e9),
        windows=len(steady.commits),
        picks=steady.picks,
        rates=tuple(heard.rates[rank] for rank in sorted(heard.rates)),
        windows_to_recover=None if changed_at is None else _recovery(steady, changed_at),
    )


def _recovery(steady: _Span, changed_at: int) -> int:
    """The first window of the changed speeds whose he is nearly that of all windows before.

    One more than there are if none is.
    """
    before: list[tuple[int, float]] = []
    after: list[tuple[int, float]] = []
    for commit, ideals in steady.windows():
        side = before if commit.epoch < changed_at else after
        side.append((sum(commit.picks.values()), sum(ideals)))
    if not before or not after:
        raise WeBroke(f"no calibrated window on both sides of the change in epoch {changed_at}")
    goal = RECOVERED * sum(done for done, _ in before) / sum(ideal for _, ideal in before)
    good = (number for number, (done, ideal) in enumerate(after, 1) if done / ideal >= goal)
    return next(good, len(after) + 1)


class _Span:
    """The commits after a moment, and the time from it to the last of them."""

    def __init__(
        self,
        commits: Sequence[tuple[Nanos, Committed]],
        start: Nanos,
        rates: Mapping[Rank, float],
        slowness: Slowness,
    ) -> None:
        self.commits = [(at, commit) for at, commit in commits if at > start]
        self.start = start
        self.ns = self.commits[-1][0] - start if self.commits else 0
        self.picks = sum(sum(commit.picks.values()) for _, commit in self.commits)
        self._rates, self._slowness = rates, slowness

    def ideal(self, which: Callable[[Iterable[float]], float]) -> float:
        """Picks in this time at the sum, the largest or the smallest of the ranks' rates."""
        return sum(which(ideals) for _, ideals in self.windows())

    def windows(self) -> Iterator[tuple[Committed, list[float]]]:
        """Every commit, and the picks each rank could have trained since the one before.

        The time up to a commit is the epoch's of that commit: windows do not cross epochs.
        """
        since = self.start
        for at, commit in self.commits:
            taken_s = (at - since) / 1e9
            yield (
                commit,
                [
                    taken_s / (1 / rate + self._slowness(rank, commit.epoch))
                    for rank, rate in self._rates.items()
                ],
            )
            since = at


def _listen(records: Iterable[Header | Record]) -> _Heard:
    heard = _Heard()
    for record in records:
        if isinstance(record, Header):
            continue
        match record.message:
            case Attached() as attached:
                heard.rates[attached.rank] = attached.free_picks_per_s
            case Issued() as issued:
                _issued(heard, issued)
            case Arrived() as arrived:
                if arrived.began_at:
                    heard.began.setdefault(arrived.rank, arrived.began_at)
                if arrived.round == heard.probe:
                    heard.awaited.discard(str(arrived.rank))
            case Committed() as commit:
                heard.commits.append((record.at, commit))
            case _:
                pass
    return heard


def _issued(heard: _Heard, issued: Issued) -> None:
    if heard.probe is None:
        if any(issued.planned.values()):
            heard.probe, heard.awaited = issued.round, set(issued.planned)
    elif heard.calibrated is None and not heard.awaited:
        heard.calibrated = issued.round
