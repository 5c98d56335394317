"""What the launcher holds of one host: control memory, arena, processes, and the way to each rank.

The host does as it is told and reports what it sees. Whether a round is issued, a rank given up
or a run ended is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control import messages
from flodl_shm.control.messages import Died, Report
from flodl_shm.engine import ticket as tickets
from flodl_shm.engine.hang import STALLED
from flodl_shm.engine.saving import stem_of
from flodl_shm.engine.ticket import ArenaShape, Ticket
from flodl_shm.errors import PeerBroke, PeersLost
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.proc import parcel
from flodl_shm.proc.environment import rank_environment, threads_per_rank, usable_cores
from flodl_shm.proc.error_file import LINK, read_error
from flodl_shm.proc.fork_server import SpawnRequest
from flodl_shm.proc.output import RankOutput
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.frame import BadFrame
from flodl_shm.shm.ring import Reader, Writer
from flodl_shm.shm.segment import Segment
from flodl_shm.wire.layout import PACE, plan_arena

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from flodl_shm.control.messages import BuildArena, Order, Quit
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.obs.run_dir import RunDir
    from flodl_shm.proc.environment import RunFacts
    from flodl_shm.proc.error_file import ErrorReport
    from flodl_shm.proc.output import Printed
    from flodl_shm.proc.supervisor import Child, Supervisor
    from flodl_shm.shm.control_block import ControlBlock

SPAWN_LIMIT_NS = 120_000_000_000  # the first rank waits for the import of torch from a cold disk
EXIT_CODES = (1, 2, 3, 4, 70)
LAST_WORDS = 100  # lines of a rank's stderr: a traceback that found no file to go to


@dataclass(slots=True)
class Member:
    """One incarnation of a rank, from its birth to its last word."""

    rank: Rank
    row: Row
    writer: Writer
    reader: Reader
    attach: socket.socket  # the descriptor of the arena goes through here
    output: RankOutput
    backlog: deque[bytes] = field(default_factory=deque)  # orders its full ring did not take
    heard_at: Nanos = Nanos(0)
    gone: bool = False
    is_broken: bool = False  # its rings cannot be trusted: it is killed and not listened to
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_WORDS))


class Host:
    """One host of the run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        *,
        facts: RunFacts,
        block: ControlBlock,
        supervisor: Supervisor,
    ) -> None:
        self.config, self.run_dir, self.facts = config, run_dir, facts
        self.block, self.supervisor = block, supervisor
        self.save_stem = stem_of(config, run_dir.path)
        self.arena: Arena | None = None
        self.members: dict[Rank, Member] = {}
        self.record = run_dir  # of the run under way; a script's first is that of the processes
        self.dead: dict[Rank, Died] = {}  # what was told of every process that has ended
        self._settled: list[Child] = []
        self._born: dict[Rank, int] = {}  # incarnations, from 0
        self._last_lines: list[Printed] = []  # of incarnations whose place was taken
        self.errors: list[ErrorReport] = []  # of ranks that failed, in the order of their ends
        self.faults: list[str] = []  # what went wrong on a ring, in words, for the screen

    # ---- birth --------------------------------------------------------------------------------

    def spawn(self, rank: Rank, row: Row) -> None:
        """Bring an incarnation of a rank into being; the one before is dead.

        Raises PeersLost if the fork server does not answer, HostUnfit if it cannot fork.
        """
        if (before := self.members.get(rank)) is not None:
            before.attach.close()
            self._last_lines.extend(self._lines_of(before))
        ours, theirs = parcel.pair()
        place = self.run_dir.rank(rank)
        output = RankOutput(
            f"[r{rank}] ", stdout_log=place / "stdout.log", stderr_log=place / "stderr.log"
        )
        try:
            request = SpawnRequest(
                ticket=tickets.encode(self._ticket(rank, row)),
                stdout=output.stdout_fd,
                stderr=output.stderr_fd,
                fds=(theirs.fileno(),),
                env=rank_environment(rank, self.facts),
            )
            deadline = Nanos(time.monotonic_ns() + SPAWN_LIMIT_NS)
            child = self.supervisor.spawn(rank, row, request, deadline=deadline)
        finally:
            theirs.close()
            output.close_writers()
        name = f"rank {rank}"
        self.members[rank] = Member(
            rank=rank,
            row=row,
            writer=Writer(self.block.down(row), ring_bell=self.block.bells[row].ring, peer=name),
            reader=Reader(self.block.up(row), peer=name),
            attach=ours,
            output=output,
        )
        self._born[rank] = self._born.get(rank, -1) + 1
        self.run_dir.write_pid(rank, child.pid, incarnation=self._born[rank])

    def _ticket(self, rank: Rank, row: Row) -> Ticket:
        config = self.config
        return Ticket(
            rank=rank,
            row=row,
            world_size=config.ranks,
            device=config.devices[rank],
            threads=config.threads or threads_per_rank(usable_cores(), config.ranks),
            seed=config.wishes.seed,
            script=str(config.script) if config.script else None,
            module=config.module,
            script_args=config.script_args,
            workload=config.workload,
            workload_options=dict(config.workload_options),
            slow=tuple((slow.factor, slow.from_epoch) for slow in config.slow_of(rank)),
            error_file=str(self.run_dir.error_file(rank)),
            stderr_log=str(self.run_dir.rank(rank) / "stderr.log"),
            cwd=os.getcwd(),
            free_run_s=0.0 if row >= config.ranks else config.free_run_s,  # nobody waits for it
            earlier=config.earlier,
            state_file=str(self.run_dir.state),
            run_id=self.run_dir.run_id,
            loans=str(self.run_dir.loans),
            save_stem=str(self.save_stem),
            callback_timeout_s=config.callback_timeout_s,
            stacks_file=str(self.run_dir.stacks_file(rank)),
        )

    # ---- arena --------------------------------------------------------------------------------

    def build_arena(self, order: BuildArena) -> str:
        """Reserve the arena; a sentence if something about it is worth telling.

        Raises HostUnfit, with bytes wanted and free, before any rank has trained a step.
        """
        rows = self.block.rows
        shape = plan_arena(
            params=order.params, buffers=order.buffers, slots=self.config.ranks, rows=rows
        )
        segment = Segment.create(shape.size, purpose="arena")
        segment.ask_for_huge_pages()
        self.arena = Arena(segment, shape, self.block.bells)
        for member in self.members.values():
            if member.gone:
                self.arena.declare_dead(member.row)
        if segment.kind == "memfd":
            return f"/dev/shm has no room for {shape.size} bytes: the arena is a memfd instead"
        return ""

    def hand_over_arena(self, rank: Rank) -> None:
        """Send a rank the arena's descriptor and its measures."""
        arena = self.arena
        assert arena is not None
        grid = arena.map.grid
        shape = ArenaShape(grid.params, grid.buffers, arena.map.slots, arena.map.rows)
        # A rank that has died meanwhile is known by its pidfd soon.
        with contextlib.suppress(ConnectionError):
            parcel.send(self.members[rank].attach, shape, [arena.segment.fd])

    # ---- messages -----------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        """Put an order into its rank's ring, or behind what the ring did not take before."""
        member = self.members[order.rank]
        member.backlog.append(messages.encode(order))
        self.flush(member)

    def flush(self, member: Member) -> None:
        """Send what waits. A full ring means a rank that does not read: its orders keep."""
        while member.backlog and not member.gone and not member.is_broken:
            try:
                member.writer.send(member.backlog[0], deadline_ns=0)
            except PeersLost:
                return
            except PeerBroke as broke:
                self._cut_off(member, str(broke))
                return
            member.backlog.popleft()

    def reports(self, now: Nanos) -> list[Report]:
        """Everything ranks have sent since the last call, each rank's in order."""
        came: list[Report] = []
        for member in self.members.values():
            self.flush(member)
            came.extend(self._reports_of(member, now))
        return came

    def _reports_of(self, member: Member, now: Nanos) -> list[Report]:
        came: list[Report] = []
        if member.is_broken:
            return came
        try:
            for body in member.reader.read_all():
                member.heard_at = now
                if isinstance(body, BadFrame):
                    self._cut_off(member, body.sentence())
                    break
                came.append(messages.decode_report(body))
        except (PeerBroke, msgspec.MsgspecError) as error:
            self._cut_off(member, str(error))
        return came

    def _cut_off(self, member: Member, why: str) -> None:
        """Something has written over a rank's rings: what it did is not known any more."""
        member.is_broken = True
        self.faults.append(f"rank {member.rank} is killed: its rings are broken: {why}")
        self.supervisor.kill(member.rank, f"its rings are broken: {why}")

    # ---- deaths -------------------------------------------------------------------------------

    def bury(self, now: Nanos) -> None:
        """Tell the survivors at once of every process that is gone, and learn how it ended."""
        deaths = self.supervisor.collect(now=now)
        for child in deaths.gone:
            member = self.members[child.rank]
            member.gone = True
            if self.arena is not None:
                self.arena.declare_dead(member.row)
        self._settled.extend(deaths.settled)

    def deaths(self) -> list[Died]:
        """Deaths whose cause is known, after everything the rank sent. Call after `reports`."""
        settled, self._settled = self._settled, []
        told = [self._death(child) for child in settled]
        self.dead |= {death.rank: death for death in told}
        return told

    def _death(self, child: Child) -> Died:
        code = child.status.code if child.status else None
        error = self._error_of(child)
        is_cut_off = error is not None and error.cause == LINK
        if error is not None and not is_cut_off:
            self.errors.append(error)
        # Only what this package refuses has an exit code of ours; the script's sys.exit(3) is a
        # failure of the script.
        refused = error is not None and error.cause == "refused"
        return msgspec.structs.replace(
            self._gone(self.members[child.rank], error.headline() if error else child.cause()),
            row=child.row,
            user_error=not is_cut_off and (bool(code) or error is not None),
            exit_code=code if refused and code in EXIT_CODES else 1,
        )

    def _gone(self, member: Member, cause: str) -> Died:
        """The end of an incarnation, with its last arrival as the cells say."""
        arrived, steps, picks = (0, 0, 0)
        if self.arena is not None:
            arrived, steps, picks = self.arena.last_arrival(member.row)
        return Died(
            rank=member.rank,
            row=member.row,
            cause=cause,
            arrived=Round(arrived),
            steps=steps,
            picks=picks,
            last_sign_at=self.last_sign(member),
        )

    def forgive(self, death: Died) -> None:
        """The rank's failure ends nothing: another incarnation may come in its place."""
        self.errors = [error for error in self.errors if error.row != death.row]
        self.dead[death.rank] = msgspec.structs.replace(death, user_error=False)

    def quit(self, report: Quit) -> Died:
        """A rank's script has left its training: it takes part no more, though it lives on."""
        member = self.members[report.rank]
        if self.arena is not None:
            self.arena.declare_dead(member.row)
        return self._gone(member, f"left the training: {report.why}")

    def _error_of(self, child: Child) -> ErrorReport | None:
        """What the process wrote before it ended, or before we killed it for another's failure."""
        if child.status is not None and child.status.code == 0:
            return None
        error = read_error(self.run_dir.error_file(child.rank))
        if error is None or error.kind == STALLED:  # which we have written: no failure of its own
            return None
        return error if error.pid == child.pid else None

    def last_sign(self, member: Member) -> Nanos:
        """When the rank last beat or was heard of."""
        return Nanos(max(self.block.beat(member.row).load(), member.heard_at))

    # ---- what is seen -------------------------------------------------------------------------

    def poll_fds(self) -> list[int]:
        """What makes a turn worth while, but for the ranks' wakeup: deaths and output."""
        fds = self.supervisor.poll_fds()
        for member in self.members.values():
            fds.extend(member.output.poll_fds())
        return fds

    def output_lines(self) -> list[Printed]:
        """Lines ranks have printed since the last call, those the user wants to see."""
        lines, self._last_lines = self._last_lines, []
        return lines + [line for one in self.members.values() for line in self._lines_of(one)]

    def _lines_of(self, member: Member) -> list[Printed]:
        printed = member.output.read()
        if member.gone:
            printed += member.output.finish()
        member.last_words.extend(line.text for line in printed if line.stream == "stderr")
        self.faults.extend(member.output.take_warnings())
        return [line for line in printed if self._is_shown(member.rank, line)]

    def _is_shown(self, rank: Rank, line: Printed) -> bool:
        wanted = self.config.show_ranks
        if wanted == "errors":
            return line.stream == "stderr"
        return wanted == "all" or rank == 0

    def progress_mark(self, rank: Rank) -> object:
        """Something that changes whenever the rank gets on."""
        member = self.members[rank]
        if self.arena is None:
            return member.heard_at
        base = self.arena.map.row(member.row) + PACE
        return member.heard_at, self.arena.q[base]

    def who_waits(self, awaited: Mapping[Rank, str], now: Nanos) -> list[str]:
        """One line per rank: alive or not, when last heard of, and what waits for it."""
        lines = []
        for member in self.members.values():
            state = "gone" if member.gone else "alive"
            age = (now - self.last_sign(member)) / 1e9
            waits = awaited.get(member.rank, "")
            words = f"; waited for: {waits}" if waits else ""
            lines.append(f"rank {member.rank} {state}, last sign {age:.1f} s ago{words}")
        return lines

    # ---- another run -------------------------------------------------------------------------

    def begin_again(self, number: int) -> None:
        """Let go of what was one run's: the living ranks want the script's next one."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.record = self.run_dir.of_run(number)

    # ---- end ----------------------------------------------------------------------------------

    def alive(self) -> list[Rank]:
        """Ranks whose process still exists."""
        return [member.rank for member in self.members.values() if not member.gone]

    def is_owed_a_cause(self) -> bool:
        """True while a process is gone and how it ended is not known yet: it may have failed."""
        return any(
            not child.is_alive and not child.settled for child in self.supervisor.children.values()
        )

    def close(self) -> None:
        """Give memory and descriptors back. Processes must be gone."""
        for member in self.members.values():
            member.attach.close()
            member.output.finish()
        shutil.rmtree(self.run_dir.loans, ignore_errors=True)
        if self.arena is not None:
            self.arena.close()
