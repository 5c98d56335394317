"""One run, one directory: everything a person or a tool wants afterwards is in it.

RUN_DIR = ROOT/<time>-<name>/ with run.json, journal.jsonl, metrics.jsonl, resources.jsonl,
summary.json and ranks/rankN/{pid,stdout.log,stderr.log,error.json,stacks.txt}; ROOT/latest
points to the newest. Whole files appear by rename, so a reader sees the old one or the new one.
This module does not know what the files mean.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.errors import BadConfig, HostUnfit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flodl_shm.ids import Rank

LATEST = "latest"
SETTINGS = "run.json"
JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
RESOURCES = "resources.jsonl"
SUMMARY = "summary.json"
TRIES = 100  # runs of one name in one second, before something is wrong with the directory

# Two words are easier to say aloud and to type than eight hex digits.
FIRST = ("brave", "calm", "eager", "fair", "fond", "keen", "kind", "lucid", "merry", "neat", "tidy")
SECOND = ("badger", "finch", "hare", "heron", "ibis", "lynx", "marten", "newt", "otter", "wren")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run. All directories exist."""

    path: Path
    run_id: str  # the directory's name: <time>-<name>

    @classmethod
    def create(cls, root: Path, *, ranks: int, name: str | None = None) -> RunDir:
        """Make the directory, one for each rank, and point ROOT/latest to it.

        Raises HostUnfit, with the path and the system's reason, when it cannot be written.
        """
        name = name or f"{secrets.choice(FIRST)}-{secrets.choice(SECOND)}"
        # Absolute: a rank may change its working directory.
        root = root.absolute()
        latest = root / LATEST
        if latest.is_dir() and not latest.is_symlink():
            raise HostUnfit(
                f"{latest} is a directory, where the link to the newest run belongs",
                hint="Rename it, or choose another place with --run-dir DIR.",
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _make_unused(root, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
            run = cls(path, path.name)
            for rank in range(ranks):
                (path / "ranks" / f"rank{rank}").mkdir(parents=True)
            _point_latest(root, path.name)
        except OSError as error:
            raise HostUnfit(
                f"cannot write the run directory under {root}: {error.strerror}",
                hint="Choose another with --run-dir DIR.",
            ) from None
        return run

    @property
    def journal(self) -> Path:
        """Every event and action."""
        return self.path / JOURNAL

    @property
    def metrics(self) -> Path:
        """One line per epoch."""
        return self.path / METRICS

    @property
    def resources(self) -> Path:
        """One line per look at what the ranks use of the machine."""
        return self.path / RESOURCES

    @property
    def summary(self) -> Path:
        """The run in one object, written at its end."""
        return self.path / SUMMARY

    @property
    def settings(self) -> Path:
        """run.json: what was asked for, by whom, on what."""
        return self.path / SETTINGS

    @property
    def state(self) -> Path:
        """What was trained, where a script under plain python has launched the run."""
        return self.path / "state.safetensors"

    @property
    def loans(self) -> Path:
        """What ranks write for those that come back; there only while some are on their way."""
        return self.path / "loans"

    def of_run(self, number: int) -> RunDir:
        """Files of a script's second run and later ones; ranks and their output stay here.

        Raises HostUnfit when it cannot be made.
        """
        name = f"run-{number}"
        try:
            (self.path / name).mkdir()
        except OSError as error:
            raise HostUnfit(f"cannot write {self.path / name}: {error.strerror}") from None
        return RunDir(self.path / name, f"{self.run_id}/{name}")

    def rank(self, rank: Rank) -> Path:
        """The directory of one rank."""
        return self.path / "ranks" / f"rank{rank}"

    def error_file(self, rank: Rank) -> Path:
        """Where the rank says why it failed."""
        return self.rank(rank) / "error.json"

    def stacks_file(self, rank: Rank) -> Path:
        """Where the rank puts its stacks when it is asked for them."""
        return self.rank(rank) / "stacks.txt"

    def write_pid(self, rank: Rank, pid: int, *, incarnation: int = 0) -> None:
        """Say that the rank exists: its process id and incarnation, on one line."""
        write_whole(self.rank(rank) / "pid", f"{pid} {incarnation}\n".encode())

    def write_settings(self, facts: Mapping[str, object]) -> None:
        """Write run.json. Raises HostUnfit when the disk refuses."""
        write_json(self.settings, {"schema": 1, "run_id": self.run_id, **facts})


def find_run(path: Path) -> Path:
    """The run directory that `path` is, or the newest one in it. Raises BadConfig on another."""
    for place in (path, path / LATEST):
        if (place / SETTINGS).is_file() or (place / JOURNAL).is_file():
            return place.resolve()
    raise BadConfig(f"there is no run in {path}", hint="Name a run directory, as runs/latest.")


def last_of(path: Path) -> Path:
    """Of a script's several runs the directory of the last one; `path` where there is one run."""
    later = {
        int(word): place
        for place in path.glob("run-*")
        if (word := place.name.removeprefix("run-")).isdecimal() and (place / JOURNAL).is_file()
    }
    return later[max(later)] if later else path


def write_json(path: Path, value: object) -> None:
    """Write `value` for people to read, appearing whole. Raises HostUnfit with the path."""
    write_whole(path, as_json(value) + b"\n")


def as_json(value: object) -> bytes:
    """`value` for people to read; what JSON has no form for becomes its text."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)


def write_whole(path: Path, body: bytes) -> None:
    """Put `body` at `path` by rename. Raises HostUnfit with the path and the system's reason."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(body)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise HostUnfit(f"cannot write {path}: {error.strerror}") from None


def _make_unused(root: Path, wanted: str) -> Path:
    """Create ROOT/wanted, or with -2, -3 ... where runs of that name began in this second."""
    for number in range(1, TRIES + 1):
        path = root / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(None, f"{TRIES} runs named {wanted} exist")


def _point_latest(root: Path, name: str) -> None:
    """Replace the link in one step: at no moment is there none, or one to nowhere."""
    fresh = root / f".{LATEST}.{name}"
    fresh.symlink_to(name, target_is_directory=True)
    fresh.replace(root / LATEST)
