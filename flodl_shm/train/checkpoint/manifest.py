"""The manifest: which files make a checkpoint, and whether they are still what was written.

manifest.json = {"schema": 1, "serial": n, "files": [{"name", "bytes", "sha256"}, ...]}, written
last; a folder without it is no checkpoint. `serial` counts the checkpoints under a stem, so that
the newest is the one published last, also where a later training has made fewer steps, and
whatever the clock did. Reads only; runs nothing of what it reads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from flodl_shm.control.checkpoint_meta import SCHEMA as META_SCHEMA
from flodl_shm.control.checkpoint_meta import CheckpointMeta, SavedFile
from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import why
from flodl_shm.train.checkpoint.names import MANIFEST, META, MODEL

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

SCHEMA: Final = 1
_JSON_BYTES: Final = 64 * 1024 * 1024  # no manifest or meta of ours comes near
_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_ITEM_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class Manifest(msgspec.Struct, frozen=True):
    """What stands in manifest.json."""

    files: tuple[SavedFile, ...]
    schema: int = SCHEMA
    serial: int = 0

    def sha256_of(self, name: str) -> str:
        """Hash of one file; empty when it is not there."""
        return next((file.sha256 for file in self.files if file.name == name), "")


class _Schema(msgspec.Struct):
    """All that every version has."""

    schema: int


class BrokenCheckpoint(BadConfig):
    """A folder that was a checkpoint and is none any more. Says what is wrong with it."""


def encode(value: object) -> bytes:
    """A manifest or meta as JSON for people to read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Parse it. Raises BrokenCheckpoint, or BadConfig when it is of a newer version."""
    manifest = _decode(folder / MANIFEST, Manifest, SCHEMA)
    for file in manifest.files:
        if not is_plain(file.name):
            raise BrokenCheckpoint(f"{folder / MANIFEST} names {file.name!r}, which is no file")
    missing = {MODEL, META} - {file.name for file in manifest.files}
    if missing:
        raise BrokenCheckpoint(f"{folder / MANIFEST} does not name {min(missing)}")
    return manifest


def is_plain(name: str) -> bool:
    """Whether a file of this name lies in the folder itself."""
    return bool(name) and name.isprintable() and "/" not in name and name not in (".", "..")


def read_meta(folder: Path) -> CheckpointMeta:
    """Parse meta.json. Raises BrokenCheckpoint, or BadConfig when it is of a newer version."""
    return _decode(folder / META, CheckpointMeta, META_SCHEMA)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise BrokenCheckpoint unless each file is there with its size. Reads none of them."""
    for file in manifest.files:
        path = folder / file.name
        try:
            size = path.stat().st_size if path.is_file() else -1
        except OSError as error:
            raise BrokenCheckpoint(f"cannot read {why(error)}") from None
        if size < 0:
            raise BrokenCheckpoint(f"{path} is missing")
        if size != file.bytes:
            raise BrokenCheckpoint(f"{path} has {size} bytes, {file.bytes} were written")


def verify(folder: Path) -> CheckpointMeta:
    """Read every byte: sizes, hashes, headers; return what the checkpoint says of itself.

    Raises BrokenCheckpoint naming the first difference, or BadConfig for a newer version.
    """
    manifest = read_manifest(folder)
    meta = read_meta(folder)  # first: a newer version is no broken one
    check_sizes(folder, manifest)
    for file in manifest.files:
        path = folder / file.name
        try:
            with path.open("rb") as body:
                digest = hashlib.file_digest(body, "sha256").hexdigest()
        except OSError as error:
            raise BrokenCheckpoint(f"cannot read {why(error)}") from None
        if digest != file.sha256:
            raise BrokenCheckpoint(f"{path} has been changed: its sha256 is another")
        if path.suffix == ".safetensors":
            check_header(path, file.bytes)
    return meta


def check_header(path: Path, size: int) -> None:
    """Raise BrokenCheckpoint unless a safetensors file's header fits its `size` in bytes.

    8 bytes of length, JSON, then the tensors without gaps, as the format's description has it.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        _check_tensors(header, size - 8 - length)
    except OSError as error:
        raise BrokenCheckpoint(f"cannot read {why(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} is no safetensors file: {error}") from None


def _check_tensors(header: dict[str, Any], body_bytes: int) -> None:
    header.pop("__metadata__", None)
    spans = []
    for name, told in header.items():
        begin, end = told["data_offsets"]
        count = 1
        for length in told["shape"]:
            count *= length
        bits = _ITEM_BITS.get(told["dtype"])
        if count < 0 or (bits is not None and 8 * (end - begin) != bits * count):
            raise ValueError(f"{name!r} has {end - begin} bytes for {told['shape']}")
        spans.append((begin, end))
    spans.sort()
    ends = [0, *(end for _, end in spans)]
    starts = [*(begin for begin, _ in spans), body_bytes]
    if any(end != begin for end, begin in itertools.zip_longest(ends, starts)):
        raise ValueError(f"its tensors do not fill {body_bytes} bytes")


def _decode(path: Path, kind: type[T], schema: int) -> T:
    body = _read(path)
    try:
        found = msgspec.json.decode(body, type=_Schema).schema
        if found <= schema:
            return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise BrokenCheckpoint(f"{path} cannot be read: {error}") from None
    raise BadConfig(
        f"{path} is of schema {found}, this flodl_shm reads up to {schema}",
        hint="Resume with the version that wrote it, or a newer one.",
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(_JSON_BYTES + 1)
    except OSError as error:
        raise BrokenCheckpoint(f"cannot read {why(error)}") from None
    if len(body) > _JSON_BYTES:
        raise BrokenCheckpoint(f"{path} is larger than {_JSON_BYTES} bytes")
    return body
