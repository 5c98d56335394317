"""Publishing: whole or invisible, the newest kept, what is in the way set aside."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from checkpoint_rig import RUN, meta, parts, publish_one

from flodl_shm.control.checkpoint_meta import SavedFile
from flodl_shm.train.checkpoint import folder
from flodl_shm.train.checkpoint.find import newest
from flodl_shm.train.checkpoint.manifest import BrokenCheckpoint, read_manifest, verify
from flodl_shm.train.checkpoint.names import MODEL, final_folder, work_folder


def names(stem):
    return sorted(path.name for path in stem.parent.iterdir())


def test_a_published_folder_has_its_name_its_files_and_a_manifest_of_all(stem):
    made = publish_one(stem, 12345)
    assert made == stem.parent / "model-000000012345"
    assert verify(made) == meta(12345)
    listed = {file.name for file in read_manifest(made).files}
    assert listed | {"manifest.json"} == {path.name for path in made.iterdir()}
    assert names(stem) == ["model-000000012345"]


def test_work_is_private_and_a_checkpoint_as_open_as_the_umask_lets_it(stem):
    work = work_folder(stem, RUN, 1)
    before = os.umask(0o027)
    try:
        files = parts(work)
        assert stat.S_IMODE(work.stat().st_mode) == 0o700
        made = folder.publish(stem, work, meta(), files)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o750


def test_what_no_rank_has_named_is_left_out(stem):
    work = work_folder(stem, RUN, 1)
    files = parts(work)
    (work / "optimizer-rank1.json").write_text("a part that failed later")
    (work / ".optimizer-rank1.safetensors.7.partial").write_text("half")
    (work / "sub").mkdir()
    made = folder.publish(stem, work, meta(), files)
    assert {p.name for p in made.iterdir()} == {f.name for f in files} | {
        "meta.json",
        "manifest.json",
    }


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda w: (w / MODEL).unlink(), "model.safetensors is missing"),
        (lambda w: (w / MODEL).write_bytes(b"x"), "has 1 bytes, [0-9]+ were written"),
    ],
)
def test_a_part_that_is_not_what_was_reported_is_no_checkpoint(stem, spoil, text):
    work = work_folder(stem, RUN, 1)
    files = parts(work)
    spoil(work)
    with pytest.raises(BrokenCheckpoint, match=text):
        folder.publish(stem, work, meta(), files)
    assert newest(stem).folder is None
    folder.drop(work)
    folder.drop(work)
    assert names(stem) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "meta.json", "manifest.json", "a\nb"])
def test_a_part_with_a_name_that_leads_elsewhere_is_refused(stem, name):
    work = work_folder(stem, RUN, 1)
    files = (*parts(work), SavedFile(name=name, bytes=0, sha256=""))
    with pytest.raises(BrokenCheckpoint, match="is no name of a part"):
        folder.publish(stem, work, meta(), files)


def test_without_a_model_there_is_no_checkpoint(stem):
    work = work_folder(stem, RUN, 1)
    _, *others = parts(work)
    with pytest.raises(BrokenCheckpoint, match="no rank has written"):
        folder.publish(stem, work, meta(), others)


def test_the_same_model_once_more_changes_nothing(stem):
    made = publish_one(stem, 3)
    before = (made / "manifest.json").read_bytes()
    assert publish_one(stem, 3, save=2, epoch=2) == made
    assert (made / "manifest.json").read_bytes() == before
    assert names(stem) == [made.name]


def test_another_training_with_the_same_stem_replaces_what_has_its_name(stem):
    made = publish_one(stem, 3, value=b"a")
    assert publish_one(stem, 3, save=2, value=b"b") == made
    assert b"b" * 16 in (made / MODEL).read_bytes()
    assert verify(made)
    assert names(stem) == [made.name]


@pytest.mark.parametrize(
    "broken",
    [
        lambda final: (final / MODEL).write_bytes(b"cut"),
        lambda final: (final / "manifest.json").unlink(),
    ],
)
def test_a_broken_folder_of_the_same_name_makes_way(stem, broken):
    made = publish_one(stem, 3)
    broken(made)
    assert publish_one(stem, 3, save=2) == made
    assert verify(made)
    assert names(stem) == [made.name]


def test_a_file_of_the_same_name_makes_way_too(stem):
    final = final_folder(stem, 3)
    final.parent.mkdir()
    final.write_text("somebody's note")
    assert verify(publish_one(stem, 3))
    assert names(stem) == [final.name]


def test_what_comes_back_between_two_renames_is_set_aside_again(stem, monkeypatch):
    made = publish_one(stem, 3, value=b"a")
    rename, calls = os.rename, []

    def meddled(source, target):
        rename(source, target)
        calls.append(source)
        if len(calls) == 1:  # set aside; another launcher's recover() puts it back at once
            rename(target, source)

    monkeypatch.setattr(os, "rename", meddled)
    assert publish_one(stem, 3, save=2, value=b"b") == made
    assert b"b" * 16 in (made / MODEL).read_bytes()
    assert names(stem) == [made.name]


def test_the_newest_are_kept(stem):
    for step in (1, 2, 3, 4):
        made = publish_one(stem, step, save=step)
        folder.prune(stem, work_folder(stem, RUN, step), 2, besides=made)
    assert names(stem) == ["model-000000000003", "model-000000000004"]


def test_never_fewer_than_one_is_kept(stem):
    for step in (1, 2):
        made = publish_one(stem, step, save=step)
        folder.prune(stem, work_folder(stem, RUN, step), 0, besides=made)
    assert names(stem) == ["model-000000000002"]


def test_newest_is_what_was_published_last_not_what_has_most_steps(stem):
    """A second training under the stem of a longer one must not lose its own to the old ones."""
    publish_one(stem, 900, save=1)
    publish_one(stem, 1000, save=2)
    made = publish_one(stem, 10, save=1, run="another")
    folder.prune(stem, work_folder(stem, "another", 1), 2, besides=made)
    assert names(stem) == ["model-000000000010", "model-000000001000"]
    assert newest(stem).folder == made


def test_a_broken_one_does_not_count_as_kept_and_goes_when_it_is_old(stem):
    first = publish_one(stem, 1, save=1)
    second = publish_one(stem, 2, save=2)
    (second / MODEL).write_bytes(b"cut")
    third = publish_one(stem, 3, save=3)
    folder.prune(stem, work_folder(stem, RUN, 3), 2, besides=third)
    assert newest(stem).folder == third
    assert names(stem) == [first.name, second.name, third.name]
    fourth = publish_one(stem, 4, save=4)
    folder.prune(stem, work_folder(stem, RUN, 4), 2, besides=fourth)
    assert names(stem) == [third.name, fourth.name]


def test_pruning_leaves_neighbours_alone(stem):
    publish_one(stem, 1)
    for name in ("model-best", "model-12", "other-000000000001", "model-000000000000.bak"):
        (stem.parent / name).mkdir()
    (stem.parent / "model-000000000007").mkdir()  # no manifest: nothing of ours, or unfinished
    made = publish_one(stem, 2, save=2)
    folder.prune(stem, work_folder(stem, RUN, 2), 1, besides=made)
    assert names(stem) == [
        "model-000000000000.bak",
        "model-000000000002",
        "model-000000000007",
        "model-12",
        "model-best",
        "other-000000000001",
    ]


def test_what_a_killed_publisher_set_aside_comes_back_or_goes(stem):
    made = publish_one(stem, 3)
    aside = made.with_name(made.name + ".old")
    os.rename(made, aside)
    assert newest(stem).folder == aside  # also before anybody has tidied up
    assert folder.recover(stem) == [(made, "put back: its replacement was not finished")]
    assert newest(stem).folder == made
    aside.mkdir()
    assert folder.recover(stem) == [(aside, "was replaced, removed")]
    assert names(stem) == [made.name]


def test_a_rename_that_fails_is_raised_and_nothing_is_lost(stem, monkeypatch):
    made = publish_one(stem, 1)

    def refuse(source, target):
        raise OSError(errno.EROFS, "Read-only file system", str(target))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Read-only"):
        publish_one(stem, 2, save=2)
    assert newest(stem).folder == made


def test_everything_is_synced_before_the_name_appears_and_the_name_after(stem, monkeypatch):
    """What a power cut may undo is only what was not synced yet."""
    calls = []
    rename, replace = os.rename, os.replace

    def noted(kind, real):
        def call(source, target):
            calls.append((kind, os.path.basename(target)))
            real(source, target)

        return call

    def sync(fd):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    work = work_folder(stem, RUN, 1)
    files = parts(work)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", noted("rename", rename))
    monkeypatch.setattr(os, "replace", noted("replace", replace))
    made = folder.publish(stem, work, meta(), files)
    assert calls == [
        ("fsync", f".meta.json.{os.getpid()}.partial"),
        ("replace", "meta.json"),
        ("fsync", f".manifest.json.{os.getpid()}.partial"),
        ("replace", "manifest.json"),
        ("fsync", work.name),
        ("rename", made.name),
        ("fsync", stem.parent.name),
    ]
