"""The reduce: every rank of a roster meets, and all members leave with the same weighted mean.

One rank's side. Arrive: publish what the window brought; wait until every peer of the roster has
arrived or is known dead. Reduce: the contributors' slots are averaged, one shard per contributor
(train/shard.py). Leave: when all shards are closed; the lowest living rank finishes the shards
of those who died. Nothing here decides who is on a roster or who is dead.

Why all ranks agree on the contributors: after the wait a peer has arrived or is dead with its
final cell, so whoever looks, whenever, sees the same arrivals. Why one worker per shard: only the
lowest living rank helps, deaths are never taken back, and the dead store nothing.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flodl_shm.control.mass import REFUSED
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot
from flodl_shm.shm.arena import ARRIVING, DEATHS, HELPING, LEAVING, REDUCING, TRAINING
from flodl_shm.shm.fence import fence, order
from flodl_shm.train.digest import Digest
from flodl_shm.train.divergence import Sampler, largest
from flodl_shm.train.kernels import Mix, warm_up
from flodl_shm.train.shard import Assembly, Hook, ShardWorker
from flodl_shm.wire.layout import ARRIVED, CLOSED, GONE, HALVES, MASS, PACE, PICKS, STATE, STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.control.messages import Seat
    from flodl_shm.shm.arena import Arena

SAMPLE = 16  # look at every 16th block for the divergence: 6 to 20 % of a round
PACE_READS = 8  # tries for an unchanging pace; a rank that died in writing leaves its last words


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round brought; all but the times is the same on every member."""

    round: Round
    contributors: tuple[Rank, ...]
    steps: int  # optimizer steps of all contributors together
    mass: float
    divergence: float  # max over sources of |x - mean| / |mean|, sampled blocks; NaN if not finite
    barrier_ns: int  # waited for the others to arrive
    reduce_ns: int  # from the last arrival to the end
    digest: int | None = None  # checksum of sampled blocks of the slot; None: nothing was agreed


class _Roster:
    """One roster as one rank sees it: its peers' cells and bells, looked up once."""

    def __init__(self, arena: Arena, seats: Sequence[Seat], row: Row) -> None:
        mine = [seat for seat in seats if seat.row == row]
        if len(mine) != 1 or len({seat.rank for seat in seats}) != len(seats):
            raise WeBroke(f"row {row} needs one seat among ranks {[seat.rank for seat in seats]}")
        self.given = seats
        self.seats = tuple(sorted(seats, key=lambda seat: seat.rank))
        self.mine = mine[0]
        self.bases = tuple(arena.map.row(seat.row) for seat in self.seats)
        peers = [
            (seat, base)
            for seat, base in zip(self.seats, self.bases, strict=True)
            if seat.row != row
        ]
        self.peer_cells = tuple((base + ARRIVED, base + GONE) for _, base in peers)
        self.peer_bells = tuple((base + GONE, arena.bells[seat.row]) for seat, base in peers)
        self.lower_gone = tuple(base + GONE for seat, base in peers if seat.rank < self.mine.rank)


class Reducer:
    """One rank's end of every reduce, and its pace cells.

    `seat_row` is this incarnation's row, `slot` its replica's memory. `sample` looks at every
    n-th parameter block for the divergence, 0 at none. `hook(point, worker, shard, block, task)`
    is for fault injection. Not for use by two threads at once.
    """

    worker_type = ShardWorker

    def __init__(
        self,
        arena: Arena,
        *,
        seat_row: Row,
        slot: Slot,
        sample: int = SAMPLE,
        hook: Hook | None = None,
    ) -> None:
        self._arena = arena
        self._q = arena.q
        self._d = arena.d
        self._row = seat_row
        self._slot = slot
        self._base = arena.map.row(seat_row)
        self._hook = hook
        grid = arena.map.grid
        self._sampler = (
            Sampler(sample, param_blocks=grid.first_buffer_block, block_floats=grid.block_floats)
            if sample and grid.first_buffer_block
            else None
        )
        self._digest = Digest(arena.slot(slot), grid, every=SAMPLE)
        self._roster: _Roster | None = None
        self._worker = self.worker_type(arena, sampler=self._sampler, hook=hook)
        warm_up()  # here, and not in the first round, where everybody would wait for it
        self._number = Round(0)  # of the round arrived in and not yet completed; 0: none

    def prepare(self, roster: Sequence[Seat]) -> None:
        """Build the views of this rank's shard for rounds in which the whole roster contributes.

        Otherwise the first such round builds them, while everybody waits.
        """
        seated = self._seated(roster)
        mine, seats, slots = seated.mine, seated.seats, [seat.slot for seat in seated.seats]
        if mine.joiner:
            return
        given = tuple(seat for seat in seats if not seat.joiner)
        equal = Mix(tuple(seat.slot for seat in given), (1.0,) * len(given))
        for number, mix in ((1, Mix(equal.slots[:1], (1.0,))), (2, equal)):
            likely = Assembly(Round(number), given, seats, mix, mix, len(given), float(len(given)))
            self._worker.prepare(likely, mine, slots)

    # ---- arriving ------------------------------------------------------------------------------

    def arrive(
        self, number: Round, roster: Sequence[Seat], *, steps: int, mass: float, picks: int
    ) -> None:
        """Publish this rank's arrival in a round and return at once; `complete` must follow.

        The slot must hold the replica. `mass` weighs the parameters; a rank with steps > 0 has
        one vote in the float buffers. A joiner passes zeros. REFUSED in place of a mass: nothing
        is read of this slot, whoever else comes. Raises WeBroke on a round that does not rise, a
        roster without this row, or a mass that is negative or not finite.
        """
        arrived = self._q[self._base + ARRIVED]
        if self._number or number <= arrived >> 1:
            raise WeBroke(f"arrived in round {arrived >> 1}, cannot arrive in {number}")
        if not (math.isfinite(mass) and (mass >= 0 or mass == REFUSED)):
            raise WeBroke(f"mass {mass} in round {number}")
        seats = self._seated(roster)
        if seats.mine.joiner and (steps or mass):
            raise WeBroke(f"a joiner brought {steps} steps and mass {mass} to round {number}")
        hook, me = self._hook, seats.mine.rank
        if hook is not None:
            hook("before arrive", me, me, 0, None)
        self._publish_arrival(number, arrived & 1 ^ 1, steps, mass, picks)
        self._number = number
        if hook is not None:
            hook("arrived", me, me, 0, None)
        self._ring(seats)
        if hook is not None:
            hook("rung", me, me, 0, None)

    def _publish_arrival(
        self, number: Round, half: int, steps: int, mass: float, picks: int
    ) -> None:
        """Slot, then the free half, then ARRIVED: reversed, a peer would average old numbers."""
        q, at = self._q, self._base + HALVES[half]
        q[self._base + STATE] = ARRIVING
        q[at + STEPS] = steps
        if self._hook is not None:
            self._hook("half arrived", self._worker.rank, self._worker.rank, 0, None)
        self._d[at + MASS] = mass
        q[at + PICKS] = picks
        fence()
        q[self._base + ARRIVED] = number << 1 | half

    def _seated(self, roster: Sequence[Seat]) -> _Roster:
        seats = self._roster
        if seats is None or seats.given != roster:
            seats = self._roster = _Roster(self._arena, roster, self._row)
            if seats.mine.slot != self._slot:
                raise WeBroke(f"seated at slot {seats.mine.slot}, replica in slot {self._slot}")
            self._worker.rank = seats.mine.rank
        return seats

    def _ring(self, roster: _Roster) -> None:
        """Wake every living peer that sleeps; the caller has stored what they wait for."""
        q = self._q
        for gone, bell in roster.peer_bells:
            if not q[gone]:
                bell.ring()

    # ---- completing ----------------------------------------------------------------------------

    def complete(self) -> Outcome:
        """Wait for the roster, reduce, help, leave. Every member's slot then holds the mean.

        The wait ends with the last arrival or death; whoever stalls is killed by the launcher
        and so ends it too. No garbage collection and one intra-op thread inside: a full
        collection costs more than a round, and threads more than they bring here.
        """
        if not self._number:
            raise WeBroke("complete without arrive")
        threads, collects = torch.get_num_threads(), gc.isenabled()
        gc.disable()
        if threads != 1:
            torch.set_num_threads(1)
        try:
            return self._complete()
        finally:
            self._number = Round(0)
            if threads != 1:
                torch.set_num_threads(threads)
            if collects:
                gc.enable()

    def _complete(self) -> Outcome:
        q, state, roster, worker = self._q, self._base + STATE, self._roster, self._worker
        assert roster is not None  # arrive has set it
        me = roster.mine
        began = time.monotonic_ns()
        self._await_arrivals(roster)
        gathered = time.monotonic_ns()
        assembly = self._assemble(roster)
        q[state] = REDUCING
        self._at("reduce", me)
        if not me.joiner:
            worker.work(assembly, me, [seat.slot for seat in assembly.members])
            self._ring(roster)
            self._at("closed, rung", me)
        q[state] = LEAVING
        self._at("leaving", me)
        self._leave(roster, assembly)
        divergence = largest(worker.divergence_sums(assembly))
        q[state] = TRAINING
        self._at("left", me)
        agreed = assembly.params.slots and assembly.buffers.slots
        return Outcome(
            round=assembly.number,
            contributors=tuple(seat.rank for seat in assembly.contributors),
            steps=assembly.steps,
            mass=assembly.mass,
            divergence=divergence,
            barrier_ns=gathered - began,
            reduce_ns=time.monotonic_ns() - gathered,
            digest=self._digest.of(assembly.number) if agreed else None,
        )

    def _at(self, point: str, me: Seat) -> None:
        if self._hook is not None:
            self._hook(point, me.rank, me.rank, 0, None)

    def _await_arrivals(self, roster: _Roster) -> None:
        q, goal, cells = self._q, self._number << 1, roster.peer_cells

        def all_here() -> bool:
            return all(not (q[arrived] < goal and not q[gone]) for arrived, gone in cells)

        self._arena.bells[self._row].wait(all_here)
        order()

    def _assemble(self, roster: _Roster) -> Assembly:
        """Read all arrivals again: the missing are dead, so the set is the same for everyone."""
        number = self._number
        here = [
            (seat, self._delivered(base))
            for seat, base in zip(roster.seats, roster.bases, strict=True)
            if self._has_arrived(base)
        ]
        given = [(seat, *brought) for seat, brought in here if not seat.joiner]
        if number == 1:  # spreads the initial state, whatever the masses
            params = buffers = Mix(tuple(seat.slot for seat, _, _ in given[:1]), (1.0,))
        else:
            # Weight 0 x NaN is NaN: who brings no mass is left out, not weighted with 0.
            heavy = [(seat.slot, mass) for seat, _, mass in given if mass > 0]
            params = Mix(tuple(s for s, _ in heavy), tuple(mass for _, mass in heavy))
            movers = tuple(seat.slot for seat, steps, _ in given if steps > 0)
            buffers = Mix(movers, (1.0,) * len(movers))
            lacks = any(mass < 0 for _, _, mass in given) or any(s.joiner for s, _ in here)
            if not movers and lacks:
                # Who is refused or joins has nothing: who did not move has what was agreed last.
                clean = tuple(seat.slot for seat, _, mass in given if mass >= 0)[:1]
                params = buffers = Mix(clean, (1.0,) * len(clean))
        return Assembly(
            number=number,
            contributors=tuple(seat for seat, _, _ in given),
            members=tuple(seat for seat, _ in here),
            params=params,
            buffers=buffers,
            steps=sum(steps for _, steps, _ in given),
            mass=sum(mass for _, _, mass in given if mass > 0),
        )

    def _has_arrived(self, base: int) -> bool:
        return self._q[base + ARRIVED] >= self._number << 1

    def _delivered(self, base: int) -> tuple[int, float]:
        """(steps, mass) of an arrival in this round.

        A joiner owns no shard, so the others can be one round ahead of it: then this round's
        numbers stand in the other half. Two rounds ahead they cannot be: the next one waits.
        """
        arrived = self._q[base + ARRIVED]
        ahead = arrived >> 1 != self._number
        at = base + HALVES[arrived & 1 ^ ahead]
        return self._q[at + STEPS], self._d[at + MASS]

    def _leave(self, roster: _Roster, assembly: Assembly) -> None:
        """Wait until all shards are closed; finish those of the dead if that falls to me."""
        q, number, shard = self._q, self._number, self._arena.map.shard
        owners = [(seat, shard(seat.slot) + CLOSED) for seat in assembly.contributors]
        while True:
            # Deaths before CLOSED: an owner seen dead, then its shard seen open, left it open.
            deaths = q[DEATHS]
            order()
            gone = self._gone(assembly) if deaths else ()
            order()
            still_open = [(seat, cell) for seat, cell in owners if q[cell] < number]
            if not still_open:
                return
            lost = [seat for seat, _ in still_open if seat.slot in gone]
            if lost and all(q[cell] for cell in roster.lower_gone):
                self._help(roster, assembly, lost, gone)
                continue
            self._wait_closed([cell for _, cell in still_open], deaths)

    def _wait_closed(self, cells: Sequence[int], deaths: int) -> None:
        q, number = self._q, self._number

        def moved() -> bool:
            if q[DEATHS] != deaths:
                return True
            return all(q[cell] >= number for cell in cells)

        self._arena.bells[self._row].wait(moved)
        order()

    def _gone(self, assembly: Assembly) -> tuple[Slot, ...]:
        """Slots of the members known dead."""
        return tuple(s.slot for s in assembly.members if self._arena.is_gone(s.row))

    def _help(
        self, roster: _Roster, assembly: Assembly, lost: Sequence[Seat], gone: Sequence[Slot]
    ) -> None:
        """Finish the shards of dead owners. Their slots need no copy: nobody will read them."""
        targets = [seat.slot for seat in assembly.members if seat.slot not in gone]
        for owner in lost:
            self._q[self._base + STATE] = HELPING + owner.slot
            self._worker.work(assembly, owner, targets)
            self._ring(roster)
        self._q[self._base + STATE] = LEAVING

    @property
    def last_rows(self) -> tuple[Row, ...]:
        """Rows of the newest roster this rank was told of; none before the first."""
        return tuple(seat.row for seat in self._roster.seats) if self._roster is not None else ()

    # ---- who lives, and how far they are -------------------------------------------------------

    def alive(self, row: Row) -> bool:
        """Whether the row's process is not known dead."""
        return not self._arena.is_gone(row)

    def publish_step(self, number: Round, done: int, now: Nanos, pace_ns: int) -> None:
        """Say how far this rank is in the window of a round: `done` steps, the last ended `now`.

        `pace_ns` is what one step takes. Peers in elastic windows read it at batch boundaries.
        """
        q, at = self._q, self._base + PACE
        version = q[at] + 1 | 1  # odd: the four below are being written
        q[at] = version
        order()
        q[at + 1] = number
        q[at + 2] = done
        q[at + 3] = now
        q[at + 4] = pace_ns
        order()
        q[at] = version + 1

    def pace_of(self, row: Row) -> tuple[Round, int, Nanos, int]:
        """(round, steps done, end of the last one, ns per step) as the row last said; zeros before.

        A rank killed inside `publish_step` leaves a mix of its last two words for good.
        """
        q, at = self._q, self._arena.map.row(row) + PACE
        words = (0, 0, 0, 0)
        for _ in range(PACE_READS):
            before = q[at]
            order()
            words = (q[at + 1], q[at + 2], q[at + 3], q[at + 4])
            order()
            if not before & 1 and q[at] == before:
                break
        return Round(words[0]), words[1], Nanos(words[2]), words[3]
