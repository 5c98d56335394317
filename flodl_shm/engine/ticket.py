"""What the launcher tells a rank at its birth, as one message through the fork server."""

from __future__ import annotations

import msgspec

from flodl_shm.control.options import CALLBACK_TIMEOUT_S
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank, Row

OptionValue = int | float | tuple[float, ...]


class Earlier(msgspec.Struct, frozen=True):
    """What a run() of the script brought before: a file with its state, or an error."""

    state: str = ""
    value: float | None = None  # of its evaluation, which every answer has, not only the scorer's
    exit_code: int = 0
    reason: str = ""


class Ticket(msgspec.Struct, frozen=True):
    """One incarnation of a rank."""

    rank: Rank
    row: Row
    world_size: int
    device: str
    threads: int
    seed: int | None  # of flags and environment; None: the script's word counts
    script: str | None
    module: str | None
    script_args: tuple[str, ...]
    workload: str | None
    workload_options: dict[str, OptionValue]
    slow: tuple[tuple[float, int], ...]  # (factor, from epoch)
    error_file: str
    stderr_log: str  # where a traceback goes besides the error file
    cwd: str
    free_run_s: float = 0.0
    earlier: tuple[Earlier, ...] | None = None  # see RunConfig
    state_file: str = ""  # where one rank then writes what it has trained
    run_id: str = ""
    loans: str = ""  # folder of what ranks write for those that come back
    save_stem: str = ""  # of the checkpoints of the script's first run, absolute
    callback_timeout_s: float = CALLBACK_TIMEOUT_S
    stacks_file: str = ""  # where it answers when it is asked for its stacks


class ArenaShape(msgspec.Struct, frozen=True):
    """What a rank needs to know of the arena whose descriptor comes along; as in plan_arena."""

    params: int
    buffers: int
    slots: int
    rows: int


_decoder = msgspec.msgpack.Decoder(Ticket)


def encode(ticket: Ticket) -> bytes:
    """The msgpack form."""
    return msgspec.msgpack.encode(ticket)


def decode(body: bytes) -> Ticket:
    """What `encode` made. Raises WeBroke on anything else: the launcher is the only sender."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WeBroke(f"a rank was born with an unreadable ticket: {error}") from error
