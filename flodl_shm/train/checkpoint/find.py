"""Finds the checkpoint to go on from, and says of each one passed over why. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import why
from flodl_shm.train.checkpoint.manifest import BrokenCheckpoint, Manifest, read_manifest, verify
from flodl_shm.train.checkpoint.names import MANIFEST, OLD, is_final

if TYPE_CHECKING:
    from pathlib import Path

    from flodl_shm.control.checkpoint_meta import CheckpointMeta


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint, or none; and the newer ones that are broken."""

    folder: Path | None
    meta: CheckpointMeta | None
    skipped: tuple[tuple[Path, str], ...] = ()  # (folder, what is wrong with it)


def newest(stem: Path) -> Found:
    """The checkpoint published last of those that are whole; incomplete ones are invisible.

    Reads every byte of it. Raises BadConfig when a newer version of flodl_shm wrote it: going on
    from an older one would lose work without a word.
    """
    skipped: list[tuple[Path, str]] = []
    for folder, _ in candidates(stem):
        try:
            return Found(folder, verify(folder), tuple(skipped))
        except BrokenCheckpoint as error:
            skipped.append((folder, error.what))
    return Found(None, None, tuple(skipped))


def load(stem_or_folder: Path) -> Found:
    """The checkpoint named by its folder, or the newest under a stem.

    Raises BadConfig when there is none, when the named folder is broken or of a newer version.
    """
    if (stem_or_folder / MANIFEST).is_file():
        return Found(stem_or_folder, verify(stem_or_folder))
    found = newest(stem_or_folder)
    if found.folder is not None:
        return found
    if found.skipped:
        _, reason = found.skipped[0]
        raise BadConfig(
            f"no checkpoint {stem_or_folder}-* is whole; the newest: {reason}",
            hint="With --resume auto a run starts afresh when there is none.",
        )
    what = "is a file" if stem_or_folder.is_file() else "holds no manifest.json"
    if stem_or_folder.exists():
        raise BadConfig(
            f"{stem_or_folder} is no checkpoint: it {what}",
            hint="Name a checkpoint's folder, as runs/latest/ckpt/model-000000012345, or a stem.",
        )
    raise BadConfig(
        f"there is no checkpoint {stem_or_folder} nor one {stem_or_folder}-*",
        hint="With --resume auto a run starts afresh when there is none.",
    )


def candidates(stem: Path) -> list[tuple[Path, Manifest | None]]:
    """Every folder with a manifest, newest first; None for a manifest that cannot be read.

    Unreadable ones come first: each may have been the newest. Where the folder is there, what it
    has replaced is none.
    """
    found: list[tuple[Path, Manifest | None]] = []
    for folder in finals(stem):
        if folder.name.endswith(OLD) and (folder.with_name(folder.name.removesuffix(OLD))).exists():
            continue
        if (folder / MANIFEST).is_file():
            try:
                found.append((folder, read_manifest(folder)))
            except BadConfig:  # broken, or newer than we are: looked at again in its turn
                found.append((folder, None))
    return sorted(found, key=_age, reverse=True)


def finals(stem: Path) -> list[Path]:
    """Everything that bears a checkpoint's name. Raises BadConfig where one may not look."""
    try:
        return [path for path in stem.parent.iterdir() if is_final(stem, path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadConfig(f"cannot look for checkpoints in {why(error)}") from None


def _age(one: tuple[Path, Manifest | None]) -> tuple[bool, int, str]:
    folder, manifest = one
    return manifest is None, manifest.serial if manifest else 0, folder.name
