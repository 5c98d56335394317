"""The ways an order can go to another process and its reports come back.

Each channel is made before the fork, `serve` runs in the child until that is killed, `ask` in the
parent. Parent and child use ring and doorbell as the launcher and a rank do. The messages are real
ones and exist before the clock starts: what is timed is encoding, carrying, waking and decoding.
The rivals carry the same fields as a pickled dict.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from flodl_shm.control import messages
from flodl_shm.control.messages import Arrived, Grant, Seat
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot
from flodl_shm.shm.control_block import ControlBlock
from flodl_shm.shm.ring import Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkContext

    from flodl_shm.shm.frame import BadFrame

LIMIT_NS = 30_000_000_000  # for a full ring; a peer that takes longer hangs

GRANT = Grant(
    rank=Rank(1),
    round=Round(41),
    epoch=3,
    roster=(Seat(Rank(0), Row(0), Slot(0)), Seat(Rank(1), Row(1), Slot(1))),
    anchor_rank=Rank(0),
    anchor_steps=10,
    planned=10,
    ceiling=1,
    spans=((4480, 4864),),
    after=1920,
)
ARRIVED = Arrived(
    rank=Rank(1),
    row=Row(1),
    round=Round(41),
    steps=10,
    batches=10,
    picks=2240,
    first_ns=20_314_159,
    rest_ns=181_592_653,
    busy_ns=200_589_793,
    data_ns=1_238_462,
    wait_ns=64_338,
    loss_sum=6.931471805599453,
    loss_count=10,
    began_at=Nanos(314_159_265_358_979),
    lr=0.1,
)


class Channel(Protocol):
    """One way to and from one child."""

    name: str

    def serve(self) -> None:
        """In the child: to every grant answer with as many arrivals as its ceiling says."""

    def ask(self, answers: int = 1) -> None:
        """A grant there and so many arrivals back: one is a round trip, many are one way."""

    def close(self) -> None:
        """Give back what it holds."""


class RingChannel:
    """Rings and doorbells, both ends parked as a rank parks."""

    name = "ring"

    def __init__(self) -> None:
        self._block = ControlBlock(2)  # the child sits in row 0; row 1 lends the parent its bell
        bell = self._block.bells[0]
        self._writer = Writer(self._block.down(Row(0)), ring_bell=bell.ring, peer="the child")
        self._reader = Reader(self._block.up(Row(0)), peer="the child")
        self._wake_parent: Callable[[], None] = self._block.bells[1].ring

    def serve(self) -> None:
        bell, reader = self._block.bells[0], Reader(self._block.down(Row(0)), peer="the parent")
        writer = Writer(self._block.up(Row(0)), ring_bell=self._wake_parent, peer="the parent")
        while True:
            bell.wait(reader.has_data)
            order = messages.decode_order(_whole(reader.read()))
            assert isinstance(order, Grant)
            for _ in range(order.ceiling):
                deadline = time.monotonic_ns() + LIMIT_NS
                writer.send(messages.encode(ARRIVED), deadline_ns=deadline)

    def ask(self, answers: int = 1) -> None:
        grant = GRANT if answers == 1 else msgspec.structs.replace(GRANT, ceiling=answers)
        self._writer.send(messages.encode(grant), deadline_ns=0)
        while answers > 0:
            self._park()
            for body in self._reader.read_all():
                messages.decode_report(_whole(body))
                answers -= 1

    def close(self) -> None:
        self._block.close()

    def _park(self) -> None:
        self._block.bells[1].wait(self._reader.has_data)


class LauncherChannel(RingChannel):
    """The same rings, the parent in poll() as the launcher is, woken by its descriptor."""

    name = "launcher"

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._poll.register(self._block.wakeup.fd, select.POLLIN)
        self._wake_parent = self._block.wakeup.notify

    def _park(self) -> None:
        self._poll.poll()
        self._block.wakeup.drain()


class PipeChannel:
    """multiprocessing.Pipe."""

    name = "pipe"

    def __init__(self, context: ForkContext) -> None:
        self._ours, self._theirs = context.Pipe()
        self._grant, self._arrived = _dicts()

    def serve(self) -> None:
        while True:
            for _ in range(self._theirs.recv()["ceiling"]):
                self._theirs.send(self._arrived)

    def ask(self, answers: int = 1) -> None:
        self._ours.send(self._grant if answers == 1 else {**self._grant, "ceiling": answers})
        for _ in range(answers):
            self._ours.recv()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class QueueChannel:
    """Two multiprocessing.Queues."""

    name = "queue"

    def __init__(self, context: ForkContext) -> None:
        self._down, self._up = context.Queue(), context.Queue()
        self._grant, self._arrived = _dicts()

    def serve(self) -> None:
        while True:
            for _ in range(self._down.get()["ceiling"]):
                self._up.put(self._arrived)

    def ask(self, answers: int = 1) -> None:
        self._down.put(self._grant if answers == 1 else {**self._grant, "ceiling": answers})
        for _ in range(answers):
            self._up.get()

    def close(self) -> None:
        for queue in (self._down, self._up):
            queue.cancel_join_thread()
            queue.close()


def _whole(body: bytes | BadFrame | None) -> bytes:
    if not isinstance(body, bytes):
        raise WeBroke(f"a benchmark's own message did not come through: {body}")
    return body


def _dicts() -> tuple[dict[str, Any], dict[str, Any]]:
    """The messages as somebody without message types would send them."""
    return msgspec.to_builtins(GRANT), msgspec.to_builtins(ARRIVED)
