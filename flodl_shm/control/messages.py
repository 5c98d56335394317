"""Every message between ranks and the coordinator, every event and every action, once.

The ring, the wire and the journal all carry these classes: msgpack in rings and on TCP, JSON in
the journal. A rank's report is an event of the coordinator, a coordinator's order to a rank is an
action, so nothing is translated on the way. Nothing here knows how a message travels.

Times are monotonic nanoseconds of this host (`*_at`) or durations in nanoseconds (`*_ns`). Picks
are counted in samples x augmentations, steps in optimizer steps.
"""

from __future__ import annotations

import msgspec

from flodl_shm.control.options import Settled, Wishes
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot

Span = tuple[int, int]  # positions [start, stop) in an epoch's permutation


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base of all; `type` in the encoded form is the class name."""


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place in a round: its cells and the memory of its replica."""

    rank: Rank
    row: Row
    slot: Slot
    joiner: bool = False  # receives the consensus, contributes nothing


# ---- rank -> coordinator -----------------------------------------------------------------------


class Ready(Message):
    """The rank has built its model and waits for the arena."""

    rank: Rank
    row: Row
    digest: str  # of the layout: names, shapes and dtypes in order
    params: int  # floats of the parameter region
    buffers: int  # floats of the float-buffer region
    samples: int  # length of the dataset, augmentation not counted
    device: str
    wishes: Wishes = Wishes()
    names: tuple[str, ...] = ()  # a few words per tensor, to name the first difference


class Attached(Message):
    """The arena is mapped, prefaulted, and the replica is bound to it."""

    rank: Rank
    row: Row
    free_picks_per_s: float = 0.0  # alone, nobody to meet; 0 unless a benchmark asked for it


class Arrived(Message):
    """The rank's window is over: its contribution to this round is complete in shared memory."""

    rank: Rank
    row: Row
    round: Round
    steps: int  # optimizer steps since the last reduce
    batches: int  # batches of the window (a user may skip an optimizer step)
    picks: int  # consumed by this incarnation since it attached, all windows together
    first_ns: int = 0  # first batch, data wait included
    rest_ns: int = 0  # the other batches, data waits included
    busy_ns: int = 0  # timed steps alone: what a rank's own rate is made of
    data_ns: int = 0  # waits for data
    wait_ns: int = 0  # from the end of the previous reduce to having this round's grant
    callback_ns: int = 0  # user callbacks inside the window
    loss_sum: float = 0.0  # over batches with a finite loss
    loss_count: int = 0
    began_at: Nanos = Nanos(0)  # first step of the window; 0 without one
    lr: float = 0.0


class Left(Message):
    """Round closed: every member holds the consensus."""

    rank: Rank
    row: Row
    round: Round
    contributors: tuple[Rank, ...]
    barrier_ns: int = 0  # waited for peers to arrive
    reduce_ns: int = 0  # from the last arrival to the end
    divergence: float = 0.0  # max over contributors of |x_r - mean| / |mean|, sampled blocks
    left_at: Nanos = Nanos(0)


class Evaluated(Message):
    """The final (or an asked for) evaluation on the consensus; `error` if the callback raised."""

    rank: Rank
    row: Row
    epoch: int
    value: float | None
    elapsed_ns: int = 0
    error: str = ""


class Finished(Message):
    """The rank copied its state out of the arena; from here on its exit is no death."""

    rank: Rank
    row: Row
    params_sha256: str
    rss_mib: float = 0.0
    pss_mib: float = 0.0


class StopRequest(Message):
    """The script on this rank wants the run to end after this window, on all ranks."""

    rank: Rank
    row: Row
    why: str


# ---- shell -> coordinator ----------------------------------------------------------------------


class Died(Message):
    """A rank's process is gone, and everything it sent before has been delivered.

    `arrived`, `steps`, `picks` are its last arrival as the cells say, since it can die between
    publishing an arrival and reporting it.
    """

    rank: Rank
    row: Row
    cause: str  # "exception", "exit 0", "signal 9", ...
    user_error: bool = False  # user code raised: the run ends
    exit_code: int = 1  # what it ends with then
    arrived: Round = Round(0)
    steps: int = 0
    picks: int = 0
    last_sign_at: Nanos = Nanos(0)


class Stop(Message):
    """Somebody wants the run to end. level 1: after this window; 2: now; 3: kill."""

    level: int
    why: str


class Tick(Message):
    """Nothing happened; deadlines may have passed."""


# ---- coordinator -> rank -----------------------------------------------------------------------


class Grant(Message):
    """What a rank may do in one window, and who meets in the round that ends it.

    `spans` are all picks the rank may consume, in order, counted from the moment it had consumed
    `after` picks: a rank that has consumed more skips the difference. So a grant can be issued
    while the previous window is under way. Grants come in the order of their rounds.
    """

    rank: Rank
    round: Round
    epoch: int
    roster: tuple[Seat, ...]
    anchor_rank: Rank
    anchor_steps: int
    planned: int  # batches believed to fill the window
    ceiling: int  # batches at most; equal to planned in an exact window
    spans: tuple[Span, ...] = ()
    after: int = 0


class Attach(Message):
    """Formation is complete: the arena's shape and the settled plan; the descriptor comes apart."""

    rank: Rank
    plan: Settled
    slot: Slot
    seats: tuple[Seat, ...]  # who will meet, as far as is known now: reduces are prepared for them
    global_step: int = 0


class Evaluate(Message):
    """Run the evaluation callback on the consensus."""

    rank: Rank
    epoch: int


class EpochMetrics(Message):
    """For whoever watches the training from inside of the script: an epoch is in the consensus.

    An epoch that is evaluated is told of twice, the second time with its value.
    """

    rank: Rank
    epoch: int
    loss: float | None
    picks: int
    value: float | None = None


class Finish(Message):
    """No more rounds: copy the state out, report, leave the engine."""

    rank: Rank
    status: str  # ok | stopped | failed
    reason: str


# ---- coordinator -> shell ----------------------------------------------------------------------


class BuildArena(Message):
    """All living ranks are ready and agree: reserve the memory and hand it out."""

    params: int
    buffers: int
    plan: Settled


class Kill(Message):
    """End this process by force; it is dead when its pidfd says so."""

    rank: Rank
    row: Row
    reason: str


class Note(Message):
    """A decision in words. The shell shows it when it changes, not when it repeats."""

    topic: str
    text: str
    alert: bool = False


class Issued(Message):
    """For the journal: a round has its roster and plan."""

    round: Round
    epoch: int
    anchor_rank: Rank
    anchor_steps: int
    planned: dict[str, int]
    reason: str


class Committed(Message):
    """A round has closed: its picks are in the consensus."""

    round: Round
    epoch: int
    contributors: tuple[Rank, ...]
    steps: dict[str, int]
    picks: dict[str, int]
    mass: dict[str, float]
    global_step: int
    loss: float | None
    divergence: float
    reduce_ns: int


class EpochClosed(Message):
    """Every dealt pick of the epoch is in the consensus."""

    epoch: int
    picks: int
    done_once: int
    duplicated: int
    missing: int
    dropped: int
    loss: float | None


class End(Message):
    """The coordinator is done; the shell lets ranks go and leaves with this code."""

    status: str  # ok | stopped | failed
    exit_code: int
    reason: str


Report = Ready | Attached | Arrived | Left | Evaluated | StopRequest | Finished
Event = Report | Died | Stop | Tick
Order = Attach | Grant | Evaluate | EpochMetrics | Finish
Action = Order | BuildArena | Kill | Note | Issued | Committed | EpochClosed | End

_encoder = msgspec.msgpack.Encoder()
_report_decoder = msgspec.msgpack.Decoder(Report)
_order_decoder = msgspec.msgpack.Decoder(Order)


def encode(message: Message) -> bytes:
    """The msgpack form that rings and the wire carry."""
    return _encoder.encode(message)


def decode_report(body: bytes | memoryview) -> Report:
    """What a rank sent. Raises msgspec.ValidationError or DecodeError on anything else."""
    return _report_decoder.decode(body)


def decode_order(body: bytes | memoryview) -> Order:
    """What the coordinator sent to a rank. Raises as `decode_report` does."""
    return _order_decoder.decode(body)
