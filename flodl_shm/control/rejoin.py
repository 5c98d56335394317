"""Dead ranks that come back: when, in which row, and how far each is on its way.

    waiting    dead; a new process is due at a certain time
    starting   the process is on its way: script, model, Ready
    ready      its model is built
    copying    a living rank writes its optimizer state for it (where that is wanted)
    fit        nothing more is wanted than its slot
    attaching  it binds its model to the slot of the dead incarnation
    attached   a joiner of the next round that is issued: then it is back

Rules. Each rank comes back so many times and no more, each time in a row nobody had. Before a
return there is a pause; it doubles as long as incarnations die without a pick in the consensus,
so a rank that flaps is held off. Who is on its way takes part in nothing, and its end costs
nothing. Once the run is ending nobody is started, and who is on its way is sent home.

Not known here: processes, rounds, what a model is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.messages import Attach, Attached, Kill, Lend, Note, Quit, Ready, Spawn
from flodl_shm.control.reduce_cycle import Living, ReduceCycle, seats_of
from flodl_shm.ids import Nanos, Rank, Row, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flodl_shm.control.messages import Action, Lent
    from flodl_shm.control.options import Survival

FIRST_PAUSE_NS = 100_000_000
LONGEST_PAUSE_NS = 30_000_000_000
MOST_SPARE_ROWS = 128  # 128 KiB of rings and a doorbell each


def rows_for(world_size: int, restarts: int) -> int:
    """Rows of a run: one for each incarnation there can be, within reason."""
    return world_size + min(world_size * restarts, max(MOST_SPARE_ROWS, world_size))


@dataclass(slots=True)
class Comer:
    """An incarnation that is on its way. `lender` writes its optimizer state for it."""

    rank: Rank
    row: Row
    state: str = "starting"
    ready: Ready | None = None
    lender: Rank | None = None


class Returns:
    """All returns of one run."""

    def __init__(self, world_size: int, survival: Survival) -> None:
        self._restarts = survival.restarts
        self._lends = survival.rejoin_optimizer == "peer"
        self._rows = rows_for(world_size, survival.restarts)
        self._next_row = world_size
        self._used: dict[Rank, int] = {}
        self._pause_ns: dict[Rank, int] = {}
        self._due: dict[Rank, Nanos] = {}
        self._coming: dict[Rank, Comer] = {}
        self._outside: set[Row] = set()  # started, and not admitted yet
        self._barred: set[Rank] = set()
        self._is_closed = False

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def returning(self) -> tuple[Rank, ...]:
        """Ranks that are dead, but not for good."""
        return tuple(sorted({*self._due, *self._coming}))

    @property
    def coming(self) -> list[Comer]:
        """Those whose process was started, by rank."""
        return [self._coming[rank] for rank in sorted(self._coming)]

    @property
    def attached(self) -> dict[Rank, Row]:
        """Those that can be on a roster, by rank."""
        return {comer.rank: comer.row for comer in self.coming if comer.state == "attached"}

    @property
    def attaching(self) -> list[Rank]:
        """Those that are on their way to their slot."""
        return [comer.rank for comer in self.coming if comer.state == "attaching"]

    @property
    def next_at(self) -> Nanos | None:
        """When the next process is due; None: nobody waits."""
        return min(self._due.values(), default=None)

    def is_near(self, now: Nanos) -> bool:
        """Whether somebody is on the way, or will be in a moment."""
        at = self.next_at
        return bool(self._coming) or (at is not None and at - now <= FIRST_PAUSE_NS)

    def is_outside(self, row: Row) -> bool:
        """Whether the row's process is or was a newcomer that has never been admitted."""
        return row in self._outside

    def find(self, rank: Rank, row: Row) -> Comer | None:
        """The newcomer in that row, while it is on its way."""
        comer = self._coming.get(rank)
        return comer if comer is not None and comer.row == row else None

    def may_return(self, rank: Rank) -> bool:
        """Whether the rank would come back if it died now."""
        started = self._next_row + len(self._due)
        return (
            not self._is_closed
            and rank not in self._barred
            and self._used.get(rank, 0) < self._restarts
            and started < self._rows
        )

    # ---- deaths and starts ----------------------------------------------------------------------

    def bar(self, rank: Rank) -> None:
        """The rank's process lives on without its training: no other one takes its place."""
        self._barred.add(rank)

    def mourn(self, rank: Rank, now: Nanos, *, contributed: bool) -> str:
        """The rank is dead: plan its return. Says what is planned; empty if nothing ever is."""
        if not self._restarts or rank in self._barred:
            return ""
        if not self.may_return(rank):
            return "it stays dead: the run ends" if self._is_closed else "it stays dead"
        before = 0 if contributed else self._pause_ns.get(rank, 0)
        pause_ns = min(2 * before or FIRST_PAUSE_NS, LONGEST_PAUSE_NS)
        self._pause_ns[rank] = pause_ns
        self._due[rank] = Nanos(now + pause_ns)
        count = f"restart {self._used.get(rank, 0) + 1} of {self._restarts}"
        return f"it is started again in {pause_ns / 1e9:g} s ({count})"

    def start_due(self, now: Nanos) -> Iterator[Action]:
        """Start those whose pause is over."""
        for rank in sorted(self._due):
            if now < self._due[rank]:
                continue
            del self._due[rank]
            row = Row(self._next_row)
            self._next_row += 1
            self._used[rank] = self._used.get(rank, 0) + 1
            self._coming[rank] = Comer(rank, row)
            self._outside.add(row)
            yield Spawn(rank, row)

    # ---- the way in -----------------------------------------------------------------------------

    def guide(self, report: Ready | Attached | Quit) -> None:
        """A newcomer has built its model, is bound to its slot, or has left."""
        comer = self.find(report.rank, report.row)
        match report:
            case Ready() if comer is not None:
                comer.ready, comer.state = report, "ready"
            case Attached() if comer is not None:
                comer.state = "attached"
            case Quit():
                self.bar(report.rank)

    def lead_in(
        self, living: Living, rounds: ReduceCycle, difference: Callable[[Ready], str]
    ) -> Iterator[Action]:
        """Take those who are ready as far as they can get.

        `difference` says in words what one has built otherwise than the others, or nothing.
        """
        yield from self._examine(living, difference)
        for comer in self.coming:
            if comer.state == "fit" and rounds.slot_is_free(comer.rank):
                comer.state = "attaching"
                yield Attach(
                    rank=comer.rank,
                    plan=rounds.plan,
                    slot=Slot(comer.rank),
                    seats=seats_of(dict(sorted({**living, comer.rank: comer.row}.items()))),
                    global_step=rounds.schedule.global_step,
                    version=rounds.before,
                    loan_of=comer.lender,
                )

    def _examine(self, living: Living, difference: Callable[[Ready], str]) -> Iterator[Action]:
        for comer in self.coming:
            if comer.state == "copying" and comer.lender not in living:
                comer.state = "ready"
            if comer.state != "ready" or comer.ready is None:
                continue
            odd = difference(comer.ready)
            if odd:
                yield from self.refuse(comer, odd)
            elif self._lends:
                comer.state, comer.lender = "copying", min(living)
                yield Lend(rank=comer.lender, row=comer.row)
            else:
                comer.state = "fit"

    def lent(self, report: Lent) -> Iterator[Action]:
        """The copy it waits for is there, or cannot be had."""
        for comer in self.coming:
            if (comer.row, comer.lender, comer.state) != (report.borrower, report.rank, "copying"):
                continue
            comer.state = "fit"
            if report.error:
                comer.lender = None
                text = f"rank {comer.rank} comes back with a fresh optimizer: {report.error}"
                yield Note("rejoin", text, alert=True)

    def admit(self, rank: Rank) -> None:
        """It is on a roster: from here on it is a rank like the others."""
        if rank in self._coming:  # else it came back in a run before this one
            self._outside.discard(self._coming.pop(rank).row)

    def refuse(self, comer: Comer, why: str) -> Iterator[Action]:
        """It cannot come back, now or later: what it built is something else."""
        self._barred.add(comer.rank)
        self._coming.pop(comer.rank, None)
        text = f"rank {comer.rank} cannot come back: {why}"
        yield Note("rejoin", text, alert=True)
        yield Kill(comer.rank, comer.row, why)

    def bury(self, rank: Rank, row: Row, cause: str, now: Nanos) -> Iterator[Action]:
        """A newcomer's process is gone before it was back."""
        if self.find(rank, row) is None:
            return  # it was sent home
        del self._coming[rank]
        planned = self.mourn(rank, now, contributed=False)
        text = f"rank {rank} was lost before it was back: {cause}; {planned}"
        yield Note("rejoin", text, alert=True)

    def close(self, why: str) -> Iterator[Action]:
        """Nobody comes back any more."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self.returning:
            yield Note("rejoin", f"rank {rank} does not come back: {why}")
        self._due.clear()
        for comer in self.coming:
            yield Kill(comer.rank, comer.row, why)
        self._coming.clear()
