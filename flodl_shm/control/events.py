"""What the coordinator is told: reports of ranks, and what the shell around it sees."""

from __future__ import annotations

import msgspec

from flodl_shm.control.checkpoint_meta import SavedFile
from flodl_shm.control.message import Message
from flodl_shm.control.options import Wishes
from flodl_shm.ids import Nanos, Rank, Round, Row

# ---- rank -> coordinator -----------------------------------------------------------------------


class Ready(Message, frozen=True):
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
    callbacks: tuple[str, ...] = ()  # of epoch, checkpoint, evaluation, metrics: what the job has


class Attached(Message, frozen=True):
    """The arena is mapped, prefaulted, and the replica is bound to it."""

    rank: Rank
    row: Row
    free_picks_per_s: float = 0.0  # alone, nobody to meet; 0 unless a benchmark asked for it


class Arrived(Message, frozen=True):
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
    scalars: dict[str, tuple[float, int]] = msgspec.field(
        default_factory=dict
    )  # name -> (sum, count)
    refused: bool = False  # its replica is not finite: mass and steps 0, picks trained nothing
    broken: str = ""  # then: which tensor, in words
    reset: int = 0  # and of how many parameters the optimizer state begins anew


class Left(Message, frozen=True):
    """Round closed: every member holds the consensus."""

    rank: Rank
    row: Row
    round: Round
    contributors: tuple[Rank, ...]
    barrier_ns: int = 0  # waited for peers to arrive
    reduce_ns: int = 0  # from the last arrival to the end
    divergence: float = 0.0  # max over contributors of |x_r - mean| / |mean|, sampled blocks
    left_at: Nanos = Nanos(0)
    digest: int | None = None  # checksum over sampled blocks of its slot; None: nothing was agreed


class Evaluated(Message, frozen=True):
    """The final (or an asked for) evaluation on the consensus; `error` if the callback raised."""

    rank: Rank
    row: Row
    epoch: int
    value: float | None
    elapsed_ns: int = 0
    error: str = ""


class Finished(Message, frozen=True):
    """The rank copied its state out of the arena; from here on its exit is no death."""

    rank: Rank
    row: Row
    params_sha256: str
    rss_mib: float = 0.0
    pss_mib: float = 0.0


class CallbackRan(Message, frozen=True):
    """A callback of the user other than the evaluation has returned, or raised `error`."""

    rank: Rank
    row: Row
    role: str  # epoch | checkpoint | metrics
    epoch: int
    elapsed_ns: int = 0
    error: str = ""
    lr: float | None = None  # an epoch callback wants this learning rate from here on, everywhere
    lr_scale: float = 1.0  # and what holds then, or held before, times this


class Request(Message, frozen=True):
    """The script on this rank asks for something at the next window's edge."""

    rank: Rank
    row: Row
    what: str  # evaluation | checkpoint


class PartSaved(Message, frozen=True):
    """This rank's files of a save are durable, or `error` says why not."""

    rank: Rank
    row: Row
    save: int
    files: tuple[SavedFile, ...] = ()
    elapsed_ns: int = 0
    error: str = ""


class Lent(Message, frozen=True):
    """The copy for the rank in row `borrower` is there, or `error` says why not."""

    rank: Rank
    row: Row
    borrower: Row
    error: str = ""


class Quit(Message, frozen=True):
    """The script left the training unfinished: this rank will not be heard of again."""

    rank: Rank
    row: Row
    why: str


class StopRequest(Message, frozen=True):
    """The script on this rank wants the run to end after this window, on all ranks."""

    rank: Rank
    row: Row
    why: str


# ---- shell -> coordinator ----------------------------------------------------------------------


class Died(Message, frozen=True):
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


class Present(Message, frozen=True):
    """A rank that came back in the script's run before this one is there, in this row."""

    rank: Rank
    row: Row


class Stop(Message, frozen=True):
    """Somebody wants the run to end. level 1: after this window; 2: now; 3: kill."""

    level: int
    why: str


class SaveRequest(Message, frozen=True):
    """Somebody outside wants a checkpoint at the next window's edge."""

    why: str


class Published(Message, frozen=True):
    """A checkpoint is visible under its name, or `error` says why it is not."""

    save: int
    folder: str = ""
    error: str = ""


class Tick(Message, frozen=True):
    """Nothing happened; deadlines may have passed."""
