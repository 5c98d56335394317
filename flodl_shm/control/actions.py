"""What the coordinator says: orders to ranks, and what the shell is to do or to write down."""

from __future__ import annotations

import msgspec

from flodl_shm.control.checkpoint_meta import CheckpointMeta, EpochClosed, SavedFile
from flodl_shm.control.message import Message, Seat, Span
from flodl_shm.control.options import Settled
from flodl_shm.ids import Rank, Round, Row, Slot

# ---- coordinator -> rank -----------------------------------------------------------------------


class Grant(Message, frozen=True):
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
    global_step: int | None = None  # for a joiner: optimizer steps of all ranks before this window


class Attach(Message, frozen=True):
    """Formation is complete: the arena's shape and the settled plan; the descriptor comes apart."""

    rank: Rank
    plan: Settled
    slot: Slot
    seats: tuple[Seat, ...]  # who will meet, as far as is known now: reduces are prepared for them
    global_step: int = 0
    checkpoint: str = ""  # folder to start from; empty: from the model as built
    state_of: Rank | None = None  # whose optimizer and random state there is this rank's now
    version: int = 0  # rounds of the training before this run
    loan_of: Rank | None = None  # whose optimizer state lies ready for it


class CallEpochFn(Message, frozen=True):
    """An epoch is about to begin: call the user's epoch function."""

    rank: Rank
    epoch: int


class AdjustRate(Message, frozen=True):
    """The learning rate from here on: this one, or the schedule's times `scale`."""

    rank: Rank
    lr: float | None
    scale: float


class Save(Message, frozen=True):
    """Write this rank's part of a checkpoint: the state right after round `after`."""

    rank: Rank
    save: int
    after: Round
    epoch: int
    has_model: bool  # the consensus is this rank's to write, and its checkpoint function to call


class Evaluate(Message, frozen=True):
    """Run the evaluation callback on the consensus."""

    rank: Rank
    epoch: int


class Lend(Message, frozen=True):
    """Write a copy of this rank's optimizer state for the one that comes back in `row`."""

    rank: Rank
    row: Row


class EpochMetrics(Message, frozen=True):
    """For whoever watches the training from inside of the script: an epoch is in the consensus.

    An epoch that is evaluated is told of twice, the second time with its value. Tuples are by
    rank; 0 or None for one that did nothing. floDl's EpochMetrics.
    """

    rank: Rank
    epoch: int
    loss: float | None  # mean over all batches with a finite loss
    picks: int
    value: float | None = None
    calls: bool = False  # this rank is to call the metrics function
    epoch_ms: float = 0.0  # from the first window's issue to the last one's commit
    scalars: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # each rank's mean, weighted by its batches
    rank_scalars: tuple[dict[str, float], ...] = ()
    rank_loss: tuple[float | None, ...] = ()
    rank_picks: tuple[int, ...] = ()
    rank_batches: tuple[int, ...] = ()
    rank_share: tuple[float, ...] = ()  # of the epoch's batches
    rank_throughput: tuple[float, ...] = ()  # picks per ms of work, data waits included
    rank_work_ms: tuple[float, ...] = ()  # steps and data waits
    rank_compute_ms: tuple[float, ...] = ()  # steps alone
    rank_starve_ms: tuple[float, ...] = ()  # data waits alone
    devices: tuple[str, ...] = ()
    closed: bool = True  # False: the epoch is under way, told for the value of an evaluation


class Finish(Message, frozen=True):
    """No more rounds: copy the state out, report, leave the engine."""

    rank: Rank
    status: str  # ok | stopped | failed
    reason: str


# ---- coordinator -> shell ----------------------------------------------------------------------


class BuildArena(Message, frozen=True):
    """All living ranks are ready and agree: reserve the memory and hand it out."""

    params: int
    buffers: int
    plan: Settled


class Spawn(Message, frozen=True):
    """Bring a dead rank into being again, as a new incarnation in a row of its own."""

    rank: Rank
    row: Row


class Rejoined(Message, frozen=True):
    """For the record: a dead rank is back, and has the consensus once this round has closed."""

    rank: Rank
    row: Row
    incarnation: int
    round: Round
    text: str


class Kill(Message, frozen=True):
    """End this process by force; it is dead when its pidfd says so."""

    rank: Rank
    row: Row
    reason: str


class Publish(Message, frozen=True):
    """All parts of a save are durable: make it a checkpoint."""

    save: int
    meta: CheckpointMeta
    files: tuple[SavedFile, ...]


class DropSave(Message, frozen=True):
    """A save cannot become a checkpoint: remove what there is of it."""

    save: int
    why: str


class Resumed(Message, frozen=True):
    """For the record: this run goes on from a checkpoint; `closed` are the epochs before."""

    folder: str
    global_step: int
    closed: tuple[EpochClosed, ...]
    text: str


class Note(Message, frozen=True):
    """A decision in words. The shell shows it when it changes, not when it repeats."""

    topic: str
    text: str
    alert: bool = False


class Issued(Message, frozen=True):
    """For the journal: a round has its roster and plan."""

    round: Round
    epoch: int
    anchor_rank: Rank
    anchor_steps: int
    planned: dict[str, int]
    reason: str


class Committed(Message, frozen=True):
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


class End(Message, frozen=True):
    """The coordinator is done; the shell lets ranks go and leaves with this code."""

    status: str  # ok | stopped | failed
    exit_code: int
    reason: str
