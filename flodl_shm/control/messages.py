"""Every message between ranks and the coordinator, every event and every action, once.

The ring, the wire and the journal all carry these classes: msgpack in rings and on TCP, JSON in
the journal. A rank's report is an event of the coordinator, a coordinator's order to a rank is an
action, so nothing is translated on the way. Nothing here knows how a message travels. They are
defined in events.py and actions.py and imported from here.

Times are monotonic nanoseconds of this host (`*_at`) or durations in nanoseconds (`*_ns`). Picks
are counted in samples x augmentations, steps in optimizer steps.
"""

from __future__ import annotations

import msgspec

from flodl_shm.control.actions import (
    AdjustRate,
    Attach,
    BuildArena,
    CallEpochFn,
    Committed,
    DropSave,
    End,
    EpochMetrics,
    Evaluate,
    Finish,
    Grant,
    Issued,
    Kill,
    Lend,
    Note,
    Publish,
    Rejoined,
    Resumed,
    Save,
    Spawn,
)
from flodl_shm.control.checkpoint_meta import CheckpointMeta, EpochClosed, SavedFile
from flodl_shm.control.events import (
    Arrived,
    Attached,
    CallbackRan,
    Died,
    Evaluated,
    Finished,
    Left,
    Lent,
    PartSaved,
    Present,
    Published,
    Quit,
    Ready,
    Request,
    SaveRequest,
    Stop,
    StopRequest,
    Tick,
)
from flodl_shm.control.message import Message, Seat, Span

__all__ = [
    "Action",
    "AdjustRate",
    "Arrived",
    "Attach",
    "Attached",
    "BuildArena",
    "CallEpochFn",
    "CallbackRan",
    "CheckpointMeta",
    "Committed",
    "Died",
    "DropSave",
    "End",
    "EpochClosed",
    "EpochMetrics",
    "Evaluate",
    "Evaluated",
    "Event",
    "Finish",
    "Finished",
    "Grant",
    "Issued",
    "Kill",
    "Left",
    "Lend",
    "Lent",
    "Message",
    "Note",
    "Order",
    "PartSaved",
    "Present",
    "Publish",
    "Published",
    "Quit",
    "Ready",
    "Rejoined",
    "Report",
    "Request",
    "Resumed",
    "Save",
    "SaveRequest",
    "SavedFile",
    "Seat",
    "Span",
    "Spawn",
    "Stop",
    "StopRequest",
    "Tick",
    "decode_order",
    "decode_report",
    "encode",
]

Report = (
    Ready
    | Attached
    | Arrived
    | Left
    | Evaluated
    | CallbackRan
    | Request
    | PartSaved
    | Lent
    | Quit
    | StopRequest
    | Finished
)
Event = Report | Died | Present | Stop | SaveRequest | Published | Tick
Order = Attach | Grant | CallEpochFn | AdjustRate | Save | Evaluate | Lend | EpochMetrics | Finish
Action = (
    Order
    | BuildArena
    | Kill
    | Spawn
    | Rejoined
    | Publish
    | DropSave
    | Resumed
    | Note
    | Issued
    | Committed
    | EpochClosed
    | End
)

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
