"""A rank's own end of everything: its rings, its arena, its heartbeat.

The launcher's death is not noticed here: the bridge thread watches the lifeline and ends the
process, so no wait below can outlive the launcher.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control import messages
from flodl_shm.engine.saving import stem_of_run
from flodl_shm.engine.ticket import ArenaShape
from flodl_shm.errors import HostUnfit, LinkLost, PeerBroke, PeersLost
from flodl_shm.gpu.pinning import pin
from flodl_shm.proc import failpoints, parcel
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.frame import BadFrame
from flodl_shm.shm.ring import Reader, Writer
from flodl_shm.shm.segment import Segment
from flodl_shm.train.reduce import Reducer
from flodl_shm.train.session import SlowDown
from flodl_shm.wire.layout import plan_arena

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torch import Tensor

    from flodl_shm.control.messages import Attach, Order, Report
    from flodl_shm.engine.ticket import Ticket
    from flodl_shm.ids import Rank, Row
    from flodl_shm.shm.control_block import ControlBlock

SEND_LIMIT_NS = 60_000_000_000  # the launcher reads within milliseconds, or it is stopped
ATTACH_LIMIT_S = 60.0  # the descriptor is sent before the order that announces it
RECENT = 20  # messages an error file tells of
_shape_decoder = msgspec.msgpack.Decoder(ArenaShape)


class ShmLink:
    """Reports go up, from any thread; orders come down to the one that trains.

    Both are this process's alone: a copy that the script has forked, and that comes back from
    there, would write over what the rank writes. It ends where it first tries.
    """

    def __init__(self, block: ControlBlock, row: Row) -> None:
        self._pid = os.getpid()
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.waits_for = ""  # what the training waits for, for whoever asks
        self._lock = threading.Lock()  # the script may ask for the end beside its training
        self._bell = block.bells[row]
        self._writer = Writer(block.up(row), ring_bell=block.wakeup.notify, peer="the launcher")
        self._reader = Reader(block.down(row), peer="the launcher")

    def send(self, report: Report) -> None:
        """Hand a report over.

        Raises PeersLost if the launcher does not read for a minute, LinkLost on a broken ring.
        """
        self._end_a_copy()
        self.recent.append(f"sent {type(report).__name__}")
        deadline = time.monotonic_ns() + SEND_LIMIT_NS
        try:
            with self._lock:
                self._writer.send(messages.encode(report), deadline_ns=deadline)
        except PeerBroke as broke:
            raise LinkLost(f"a report was lost: {broke}") from None

    def receive(self, *, wait_for: str) -> Order:
        """The next order. Ends with one, or with the process when the launcher is gone."""
        self._end_a_copy()
        self.waits_for = wait_for
        order = None
        while order is None:
            self._bell.wait(self._reader.has_data)
            order = self._take()
        self.waits_for = ""
        return order

    def poll(self) -> Order | None:
        """The next order if it is there already, as a whole."""
        self._end_a_copy()
        return self._take() if self._reader.has_data() else None

    def _end_a_copy(self) -> None:
        if os.getpid() == self._pid:
            return
        text = (
            f"process {os.getpid()}, which the script has forked in rank process {self._pid}, came"
            " back into the training and is ended. Let it end by os._exit().\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(1)

    def _take(self) -> Order | None:
        """The next order; None when only a part of a long one has come yet."""
        try:
            body = self._reader.read()
        except PeerBroke as broke:
            raise LinkLost(f"an order was lost: {broke}") from None
        if body is None:
            return None
        if isinstance(body, BadFrame):
            raise LinkLost(f"an order was lost: {body.sentence()}")
        order = messages.decode_order(body)
        self.recent.append(f"got {type(order).__name__}")
        return order


class ShmSession:
    """One incarnation of a rank under the launcher; what train/session.py asks for."""

    def __init__(self, ticket: Ticket, block: ControlBlock, attach_socket: socket.socket) -> None:
        self.rank: Rank = ticket.rank
        self.row: Row = ticket.row
        self.world_size = ticket.world_size
        self.device = ticket.device
        self.seed = ticket.seed
        self.free_run_s = ticket.free_run_s
        self.slow = tuple(SlowDown(factor, epoch) for factor, epoch in ticket.slow)
        self.run_id = ticket.run_id
        self.loans = ticket.loans
        self.callback_timeout_s = ticket.callback_timeout_s
        self.link = ShmLink(block, ticket.row)
        self._stem = ticket.save_stem
        self._runs = 0
        self._block = block
        self._socket = attach_socket
        self._arena: Arena | None = None
        self._reducer: Reducer | None = None
        self._unpin: Callable[[], None] | None = None

    def attach(self, order: Attach) -> tuple[Reducer, Tensor]:
        """Map the run's arena, fault its pages in, and take this rank's place in it."""
        self._leave_arena()
        self._runs += 1
        self._socket.settimeout(ATTACH_LIMIT_S)
        packet = parcel.receive(self._socket, _shape_decoder)
        if packet is None:
            raise PeersLost("the launcher closed the connection before it sent the arena")
        shape, (descriptor,) = packet
        arena_map = plan_arena(
            params=shape.params, buffers=shape.buffers, slots=shape.slots, rows=shape.rows
        )
        segment = Segment.adopt(descriptor, arena_map.size)
        segment.prefault()
        arena = Arena(segment, arena_map, self._block.bells)
        self._arena, self._reducer = arena, None
        if self.device.startswith("cuda"):
            self._pin(arena)
        hook = None
        if failpoints.ARMED:
            failpoints.hit("attach")
            hook = failpoints.hit_in_reduce
        reducer = Reducer(arena, seat_row=self.row, slot=order.slot, hook=hook)
        reducer.prepare(order.seats)
        self._reducer = reducer
        return reducer, arena.slot(order.slot)

    def note_errand(self, since: int) -> None:
        """For the launcher: engine/watch.py gives errands more time."""
        self._block.errand(self.row).store(since)

    @property
    def save_stem(self) -> str:
        """The stem of this run's checkpoints: every run of a script has its own."""
        return stem_of_run(self._stem, max(1, self._runs))

    def is_lowest(self) -> bool:
        """True once every rank below this one is gone, well or not; asked after a run.

        Without an arena, of a run that was stopped before there was one, every rank passes.
        """
        arena, reducer = self._arena, self._reducer
        if arena is None or reducer is None:
            return True
        return all(arena.is_gone(row) for row in reducer.last_rows if row < self.row)

    def _leave_arena(self) -> None:
        """Give back that of the run before: its replica has moved out."""
        if self._unpin is not None:
            self._unpin()  # before the mapping goes, or its addresses would be poisoned
            self._unpin = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _pin(self, arena: Arena) -> None:
        """Let the device copy straight from and to the arena, as long as that is mapped."""
        import torch

        torch.cuda.set_device(torch.device(self.device))
        runtime = torch.cuda.cudart()
        self._unpin, why = pin(runtime, arena.flat.data_ptr(), arena.segment.size)
        if why:
            print(f"warning: {why}", file=sys.stderr)


class Bridge:
    """The rank's second thread: beats, and ends the process when the launcher is gone."""

    BEAT_S = 0.1

    def __init__(self, block: ControlBlock, row: Row, lifeline: int) -> None:
        self._beat = block.beat(row)
        self._lifeline = lifeline
        self._beat.store(time.monotonic_ns())
        self._thread = threading.Thread(target=self._run, name="flodl-bridge", daemon=True)

    def start(self) -> None:
        """Begin to beat. Raises HostUnfit where no thread is to be had."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise HostUnfit(
                f"a rank cannot have its second thread: {error}",
                hint="Raise ulimit -u, or the container's limit of processes.",
            ) from None

    def _run(self) -> None:
        import select

        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        while not poll.poll(self.BEAT_S * 1000):
            self._beat.store(time.monotonic_ns())
        os._exit(PeersLost.exit_code)  # nobody is left to read an error file or a report
