"""Makes a checkpoint of a work folder, and removes the ones that are too many.

At every instant each checkpoint is whole or invisible, and one that was whole stays so until a
newer one is durable: files, meta.json, manifest.json and the folder are synced, then the folder is
renamed and its parent synced, then older ones go. To go is to be renamed first, so nothing half
removed bears a checkpoint's name.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import BadConfig
from flodl_shm.proc import failpoints
from flodl_shm.train.checkpoint.durable import (
    open_to_readers,
    remove_tree,
    sync_folder,
    write_durably,
)
from flodl_shm.train.checkpoint.find import candidates, finals
from flodl_shm.train.checkpoint.manifest import (
    BrokenCheckpoint,
    Manifest,
    check_sizes,
    encode,
    is_plain,
    read_manifest,
    verify,
)
from flodl_shm.train.checkpoint.names import (
    MANIFEST,
    META,
    MODEL,
    OLD,
    doomed_folder,
    final_folder,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flodl_shm.control.checkpoint_meta import CheckpointMeta, SavedFile

# Another process that tidies up may put an old checkpoint back, once.
_TRIES: Final = 3
_IN_THE_WAY: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def publish(stem: Path, work: Path, meta: CheckpointMeta, files: Sequence[SavedFile]) -> Path:
    """Make `work` with these files the checkpoint STEM-<global_step>, and return its folder.

    Everything else in `work` is removed. A checkpoint of that name that holds the same model
    stays, and `work` goes; one of another model, or a broken one, is replaced. Raises
    BrokenCheckpoint when a file is missing or has another size, OSError when the disk refuses;
    `work` is invisible then and the caller's to drop.
    """
    _check_parts(work, files)
    kept = {file.name for file in files}
    for path in work.iterdir():
        if path.name not in kept:
            remove_tree(path)
    told = write_durably(work, META, [encode(meta)])
    manifest = Manifest(files=(*files, told), serial=1 + _last_serial(stem))
    if failpoints.ARMED:
        failpoints.hit("save.manifest")
    write_durably(work, MANIFEST, [encode(manifest)])
    open_to_readers(work)
    sync_folder(work)
    final = final_folder(stem, meta.global_step)
    if failpoints.ARMED:
        failpoints.hit("save.publish")
    if _holds_the_same(final, manifest):
        remove_tree(work)
    else:
        _take_the_name(work, final)
    return final


def _check_parts(work: Path, files: Sequence[SavedFile]) -> None:
    for file in files:
        if not is_plain(file.name) or file.name in (META, MANIFEST):
            raise BrokenCheckpoint(f"{file.name!r} is no name of a part")
    if MODEL not in {file.name for file in files}:
        raise BrokenCheckpoint(f"no rank has written {work / MODEL}")
    check_sizes(work, Manifest(files=tuple(files)))


def _last_serial(stem: Path) -> int:
    return max((manifest.serial for _, manifest in candidates(stem) if manifest), default=0)


def _holds_the_same(final: Path, manifest: Manifest) -> bool:
    """Whether a whole checkpoint of the same model is there already."""
    try:
        same = read_manifest(final).sha256_of(MODEL) == manifest.sha256_of(MODEL)
        return same and bool(verify(final))
    except BadConfig:
        return False


def _take_the_name(work: Path, final: Path) -> None:
    """Rename; what is in the way is set aside first and removed when the new one is durable.

    Killed in between, the old one is found under its other name, and `recover` puts it back.
    """
    old = final.with_name(final.name + OLD)
    for attempt in range(_TRIES):
        if os.path.lexists(final):
            remove_tree(old)
            os.rename(final, old)
        try:
            os.rename(work, final)
            break
        except OSError as error:
            if error.errno not in _IN_THE_WAY or attempt == _TRIES - 1:
                raise
    sync_folder(final.parent)
    if os.path.lexists(old):
        remove_tree(old)


def prune(stem: Path, work: Path, keep: int, *, besides: Path) -> None:
    """Remove all but the newest `keep` whole checkpoints, `besides` being one of them in any case.

    Whole is: every file is there with its size. Broken ones newer than those kept stay: they may
    be what somebody wants to look into. `work` names the run that removes. Raises OSError.
    """
    left = max(keep, 1) - 1
    for folder, manifest in candidates(stem):
        if manifest is None or folder == besides:
            continue
        if left and _has_its_files(folder, manifest):
            left -= 1
        elif not left:
            remove_checkpoint(folder, work)


def _has_its_files(folder: Path, manifest: Manifest) -> bool:
    try:
        check_sizes(folder, manifest)
    except BrokenCheckpoint:
        return False
    return True


def remove_checkpoint(folder: Path, work: Path) -> None:
    """Take its name away in one step, then remove it. Raises OSError."""
    doomed = doomed_folder(work, folder)
    try:
        os.rename(folder, doomed)
    except FileNotFoundError:
        return  # another run with this stem was faster
    remove_tree(doomed)


def drop(work: Path) -> None:
    """Remove a work folder, whatever is in it; nothing there is fine. Raises OSError."""
    remove_tree(work)


def recover(stem: Path) -> list[tuple[Path, str]]:
    """Put back what a killed publisher has set aside, or remove it where it was replaced.

    Returns what was done, in words. Raises OSError.
    """
    done = []
    for path in sorted(finals(stem)):
        if not path.name.endswith(OLD):
            continue
        final = path.with_name(path.name.removesuffix(OLD))
        if os.path.lexists(final):
            remove_tree(path)
            done.append((path, "was replaced, removed"))
        else:
            os.rename(path, final)
            done.append((final, "put back: its replacement was not finished"))
    return done
