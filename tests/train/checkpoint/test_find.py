"""Finding: the newest whole one, a reason for each that is not, and refusals that touch nothing."""

from __future__ import annotations

import json
import os
import random

import msgspec
import pytest
from checkpoint_rig import meta, publish_one, tensor_bytes

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import write_durably
from flodl_shm.train.checkpoint.find import load, newest
from flodl_shm.train.checkpoint.manifest import Manifest, encode, verify
from flodl_shm.train.checkpoint.names import MODEL


def rewrite(folder, name, body):
    """Change a file and the manifest with it, as somebody does who prepares a checkpoint."""
    told = write_durably(folder, name, [body])
    old = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    files = (*(file for file in old.files if file.name != name), told)
    (folder / "manifest.json").write_bytes(encode(Manifest(files=files, serial=old.serial)))


def edit_json(folder, name, **more):
    told = json.loads((folder / name).read_text()) | more
    (folder / name).write_text(json.dumps(told))


def test_nothing_there_is_no_error(stem):
    assert newest(stem).folder is None
    stem.parent.mkdir()
    assert newest(stem) == newest(stem.parent / "x" / "y")
    (stem.parent / "file").write_text("")
    assert newest(stem.parent / "file" / "model").folder is None


def test_the_newest_whole_one_is_found_with_its_meta(stem):
    publish_one(stem, 1)
    made = publish_one(stem, 2, epoch=2)
    found = newest(stem)
    assert (found.folder, found.meta, found.skipped) == (made, meta(2, epoch=2), ())


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


BROKEN = {
    "gone": (lambda f: (f / MODEL).unlink(), "model.safetensors is missing"),
    "cut": (lambda f: cut(f / MODEL), "were written"),
    "changed": (lambda f: flip(f / MODEL), "its sha256 is another"),
    "meta changed": (lambda f: flip(f / "optimizer-rank0.json"), "its sha256 is another"),
    "meta gone": (lambda f: (f / "meta.json").unlink(), "meta.json: No such file"),
    "meta odd": (lambda f: (f / "meta.json").write_text("[]"), "meta.json cannot be read"),
    "meta poor": (lambda f: (f / "meta.json").write_text('{"schema": 1}'), "meta.json cannot be"),
    "manifest cut": (lambda f: cut(f / "manifest.json"), None),
    "manifest half": (lambda f: (f / "manifest.json").write_text('{"schema'), "cannot be read"),
    "manifest deep": (lambda f: (f / "manifest.json").write_text("[" * 99999), "cannot be read"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text(""), "cannot be read"),
    "no model": (lambda f: edit_json(f, "manifest.json", files=[]), "does not name"),
    "leads away": (
        lambda f: edit_json(
            f, "manifest.json", files=[{"name": "../x", "bytes": 1, "sha256": "x"}]
        ),
        "names '../x', which is no file",
    ),
    "a folder": (lambda f: ((f / MODEL).unlink(), (f / MODEL).mkdir()), "is missing"),
    "no header": (lambda f: rewrite(f, MODEL, b"1234"), "is no safetensors file"),
    "long header": (lambda f: rewrite(f, MODEL, b"\xff" * 64), "is no safetensors file"),
    "odd header": (
        lambda f: rewrite(f, MODEL, (2).to_bytes(8, "little") + b"[]"),
        "no safetensors",
    ),
    "few bytes": (lambda f: rewrite(f, MODEL, tensor_bytes(shape=(5,))), "has 16 bytes for"),
    "a gap": (lambda f: rewrite(f, MODEL, tensor_bytes() + b"more"), "do not fill 20 bytes"),
    "past the end": (lambda f: rewrite(f, MODEL, tensor_bytes(shape=(8,), end=32)), "do not fill"),
    "pickle": (lambda f: rewrite(f, MODEL, b"\x80\x04K\x01."), "is no safetensors file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_newest_one_falls_back_to_the_one_before_and_says_why(stem, case):
    spoil, text = BROKEN[case]
    before = publish_one(stem, 1)
    made = publish_one(stem, 2)
    spoil(made)
    found = newest(stem)
    if text is None:  # only the line end at the end of the manifest is gone
        assert found.folder == made
        return
    assert found.folder == before
    [(folder, why)] = found.skipped
    assert folder == made
    assert text in why
    with pytest.raises(BadConfig) as caught:
        load(made)
    assert text in str(caught.value)
    assert load(stem) == found


def test_nothing_but_broken_ones_is_said_so(stem):
    made = publish_one(stem, 1)
    flip(made / MODEL)
    assert newest(stem).folder is None
    with pytest.raises(BadConfig, match=r"no checkpoint .*model-\* is whole; the newest: .*sha256"):
        load(stem)


@pytest.mark.parametrize("name", ["manifest.json", "meta.json"])
def test_a_newer_version_is_refused_with_both_numbers_and_not_passed_over(stem, name):
    publish_one(stem, 1)
    made = publish_one(stem, 2)
    edit_json(made, name, schema=7, files="as it will be then")
    before = sorted((p, p.stat().st_mtime_ns) for p in stem.parent.rglob("*"))
    for look in (newest, load):
        with pytest.raises(BadConfig, match="is of schema 7, this flodl_shm reads up to 1"):
            look(stem)
    with pytest.raises(BadConfig, match="is of schema 7"):
        load(made)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in stem.parent.rglob("*"))


def test_fields_of_a_later_version_of_the_same_schema_are_passed_over(stem):
    made = publish_one(stem, 1)
    told = json.loads((made / "meta.json").read_text())
    rewrite(made, "meta.json", json.dumps(told | {"later": 1}).encode())
    assert verify(made) == meta(1)


def test_a_folder_without_manifest_is_invisible(stem):
    made = publish_one(stem, 1)
    (publish_one(stem, 2) / "manifest.json").unlink()
    found = newest(stem)
    assert (found.folder, found.skipped) == (made, ())


def test_what_is_no_checkpoint_is_refused_in_one_sentence(stem, tmp_path):
    (tmp_path / "file.pt").write_bytes(b"x")
    with pytest.raises(BadConfig, match=r"file.pt is no checkpoint: it is a file"):
        load(tmp_path / "file.pt")
    with pytest.raises(BadConfig, match=r"is no checkpoint: it holds no manifest.json"):
        load(tmp_path)
    with pytest.raises(BadConfig, match=r"there is no checkpoint .*ckpt/model nor one .*model-\*"):
        load(stem)


def test_a_place_one_may_not_look_into_is_said(stem, monkeypatch):
    stem.parent.mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(
        BadConfig, match=r"cannot look for checkpoints in .*ckpt: Permission denied"
    ):
        newest(stem)


def test_whatever_somebody_writes_only_our_errors_come_out(stem):
    draw = random.Random(10)
    made = publish_one(stem, 1)
    names = ("manifest.json", "meta.json", MODEL)
    bodies = {name: (made / name).read_bytes() for name in names}
    for _ in range(300):
        name = draw.choice(names)
        body = bytearray(bodies[name])
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(body))
            body[at] = draw.choice([0, 0xFF, *b'0{}[]",:9e-', body[at] ^ 1])
        if name == "manifest.json":
            (made / name).write_bytes(body)
        else:
            rewrite(made, name, body)
        for look in (newest, load):
            try:
                look(stem)
            except BadConfig:
                pass
        (made / name).write_bytes(bodies[name])
        (made / "manifest.json").write_bytes(bodies["manifest.json"])
    assert newest(stem).folder == made
