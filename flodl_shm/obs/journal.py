"""The record of a run: every event and action of the coordinator, one JSON line each, in order.

The first line is a header with all that a coordinator is made of. The classes are those of
control/messages.py, so a line can be read back into the very message that was stepped. A full
disk must not stop a training: the journal says so once and ends there, since a gap in the middle
would make it a lie. While the file is being written its writer holds a lock on it, which the
kernel releases with the process: whether a run is under way is a fact, not a guess.
"""

from __future__ import annotations

import fcntl
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from flodl_shm.control import messages
from flodl_shm.control.messages import Action, Evaluated, Event, Message
from flodl_shm.control.options import Wishes
from flodl_shm.control.resume import Resume
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Nanos

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

SCHEMA = 1
FLOCK = struct.Struct("@hhqqi4x")  # struct flock of Linux on 64 bits: type, whence, start, len, pid
NO_NUMBERS = ("nan", "inf", "-inf")
Kind = Literal["event", "action", "note"]


class Header(msgspec.Struct, frozen=True):
    """The first line: what was run, by which versions, and when on the wall clock."""

    schema: int
    run_id: str
    started: str  # wall time, ISO 8601: the only one in the file
    started_at: Nanos  # the same moment on the clock of all other lines
    versions: dict[str, str]
    world_size: int = 0  # this and the next two are what the coordinator was made with
    flags: Wishes = Wishes()
    resume: Resume | None = None


class Record(msgspec.Struct, frozen=True):
    """One line. `note` is the shell's own remark; the coordinator never saw it."""

    kind: Kind
    at: Nanos
    message: Event | Action


class Journal:
    """Appends records to one file. `warn` is told, once, when the disk refuses."""

    def __init__(self, path: Path, *, warn: Callable[[str], None]) -> None:
        """Create the file, which must not exist. Raises OSError when it cannot be created."""
        self._path = path
        self._warn = warn
        self._encoder = msgspec.json.Encoder()
        # Unbuffered: a line is in the kernel when `write` returns, so a killed launcher loses none.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._broken = False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # a file system without locks: only `flodl-shm status` knows less

    def header(
        self,
        *,
        run_id: str,
        started: str,
        at: Nanos,
        versions: Mapping[str, str],
        world_size: int,
        flags: Wishes,
        resume: Resume | None = None,
    ) -> None:
        """Write the first line."""
        self._line(Header(SCHEMA, run_id, started, at, dict(versions), world_size, flags, resume))

    def write(self, kind: Kind, message: Message, now: Nanos) -> None:
        """Append one record. Never raises because of the disk."""
        self._line({"kind": kind, "at": now, "message": _written(message)})

    def close(self) -> None:
        """Give the file back to the system; twice is harmless."""
        self._file.close()

    def _line(self, value: object) -> None:
        if self._broken:
            return
        line = self._encoder.encode(value) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            self._give_up(error.strerror or str(error))
            return
        if written != len(line):  # a nearly full disk takes a part of a line
            self._give_up(f"{written} of {len(line)} bytes were taken")

    def _give_up(self, why: str) -> None:
        self._broken = True
        self._warn(f"the journal {self._path} ends here ({why}); the training goes on without it")


def writer_of(path: str | os.PathLike[str]) -> int | None:
    """The process that writes the journal; None if none does, 0 if we cannot see which.

    Asks for the lock's holder and takes nothing. Raises OSError if the file cannot be opened.
    """
    with open(path, "rb") as file:
        asked = FLOCK.pack(fcntl.F_RDLCK, 0, 0, 0, 0)
        kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))


def read(
    path: str | os.PathLike[str], *, only: Collection[type[Message]] = ()
) -> Iterator[Header | Record]:
    """The header, then every record, or those with messages of a class in `only`.

    Lines of other classes are then not decoded. A last line without its end is what a kill left
    and is passed over. Raises BadConfig on a file that is no journal of this schema.
    """
    header = msgspec.json.Decoder(Header)
    names = "|".join(kind.__name__ for kind in only)
    is_wanted = re.compile(rf'"message":\{{"type":"(?:{names})"'.encode()).search if only else None
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            if is_wanted is not None and number > 1 and not is_wanted(line):
                continue
            try:
                one = header.decode(line) if number == 1 else decode(line)
            except msgspec.MsgspecError as error:
                raise BadConfig(
                    f"{path} line {number} is no record of a journal: {error}"
                ) from None
            if isinstance(one, Header) and one.schema != SCHEMA:
                raise BadConfig(f"{path} has schema {one.schema}, this version reads {SCHEMA}")
            yield one


def _written(message: Message) -> Message | dict[str, Any]:
    """A score that is no number as a word: null would say that there was no evaluation."""
    if not isinstance(message, Evaluated) or message.value is None or math.isfinite(message.value):
        return message
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return {**fields, "value": str(message.value)}


_decoder = msgspec.json.Decoder(Record)


def decode(line: bytes) -> Record:
    """One record. Raises msgspec.MsgspecError on anything else."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:
        raw = msgspec.json.decode(line)
        if not _put_nan_back(raw):
            raise
        return msgspec.convert(raw, Record)


def _put_nan_back(raw: Any) -> bool:
    """JSON has no word for a float that is none, so null stands there, or `_written`'s word.

    True if one was found.
    """
    message = raw.get("message") if isinstance(raw, dict) else None
    if not isinstance(message, dict):
        return False
    fields = getattr(getattr(messages, str(message.get("type")), None), "__annotations__", {})
    broken = [
        name for name, value in message.items() if value is None and fields.get(name) == "float"
    ]
    message.update(dict.fromkeys(broken, math.nan))
    if message.get("type") == "Evaluated" and message.get("value") in NO_NUMBERS:
        broken.append("value")
        message["value"] = float(message["value"])
    return bool(broken)
