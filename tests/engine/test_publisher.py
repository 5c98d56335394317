"""The launcher's publisher: in order, in a thread, every failure an event, nothing left behind."""

from __future__ import annotations

import errno
import os
import threading

import msgspec
import pytest

from flodl_shm.control.checkpoint_meta import CheckpointMeta, SavedFile
from flodl_shm.control.messages import DropSave, Publish, Published
from flodl_shm.engine.publisher import Publisher
from flodl_shm.errors import HostUnfit
from flodl_shm.train.checkpoint import folder
from flodl_shm.train.checkpoint.durable import make_folder, write_durably
from flodl_shm.train.checkpoint.find import newest

WAIT_S = 20.0
RUN = "20250101-120000-calm-finch/run-2"
EMPTY = (2).to_bytes(8, "little") + b"{}"


def meta(step):
    return CheckpointMeta(
        save_reason="checkpoint",
        epoch=1,
        epochs=3,
        global_step=step,
        reduce=5,
        world_size=2,
        ranks=(0, 1),
        seed=0,
        policy="sync",
        batch_sizes=(4, 4),
        samples=64,
        augment=1,
        tail="drop",
        digest="d",
        names=(),
    )


class Desk:
    def __init__(self, stem, keep=2, run=RUN):
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.woken = threading.Semaphore(0)
        self.publisher = Publisher(stem, run, keep, self.woken.release)
        self.stem = stem

    def order(self, save):
        """A save whose parts are there."""
        work = self.publisher.folder_of(save)
        make_folder(work)
        files = (
            write_durably(work, "model.safetensors", [EMPTY]),
            write_durably(work, "optimizer-rank0.json", [str(save).encode()]),
        )
        return Publish(save=save, meta=meta(save), files=files)

    def wait(self, count):
        """Wait for so many answers."""
        for _ in range(count):
            assert self.woken.acquire(timeout=WAIT_S)
        return self.publisher.take()

    def names(self):
        return sorted(path.name for path in self.stem.parent.iterdir())


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path / "ckpt" / "model")
    yield desk
    assert desk.publisher.close(WAIT_S)


def test_what_is_published_wakes_the_loop_and_is_told_once(desk):
    desk.publisher.publish(desk.order(7))
    made = desk.stem.parent / "model-000000000007"
    assert desk.wait(1) == [Published(save=7, folder=str(made))]
    assert desk.publisher.take() == []
    assert newest(desk.stem).folder == made


def test_saves_come_out_in_order_and_the_newest_stay(desk):
    orders = [desk.order(save) for save in (1, 2, 3)]
    for order in orders:
        desk.publisher.publish(order)
    assert [told.save for told in desk.wait(3)] == [1, 2, 3]
    assert desk.publisher.close(WAIT_S)
    assert desk.names() == ["model-000000000002", "model-000000000003"]


def test_without_a_number_all_stay(tmp_path):
    desk = Desk(tmp_path / "model", keep=None)
    for save in (1, 2, 3):
        desk.publisher.publish(desk.order(save))
    desk.wait(3)
    assert desk.publisher.close(WAIT_S)
    assert len(desk.names()) == 3


def test_a_dropped_save_leaves_nothing_and_says_nothing(desk):
    desk.order(1)
    desk.publisher.drop(DropSave(save=1, why="its writer died"))
    desk.publisher.drop(DropSave(save=9, why="never begun"))
    desk.publisher.publish(desk.order(2))
    assert [told.save for told in desk.wait(1)] == [2]
    assert desk.publisher.close(WAIT_S)
    assert desk.names() == ["model-000000000002"]


def test_a_part_that_is_missing_is_an_error_in_one_sentence(desk):
    order = desk.order(1)
    gone = SavedFile(name="optimizer-rank1.json", bytes=3, sha256="x")
    desk.publisher.publish(msgspec.structs.replace(order, files=(*order.files, gone)))
    [told] = desk.wait(1)
    assert told.folder == ""
    assert told.error.startswith("the checkpoint was not made: ")
    assert told.error.endswith("optimizer-rank1.json is missing")


def test_a_meta_that_cannot_be_written_down_is_an_error_too(desk):
    order = desk.order(1)
    odd = msgspec.structs.replace(order.meta, el_che={"x": object()})
    desk.publisher.publish(msgspec.structs.replace(order, meta=odd))
    [told] = desk.wait(1)
    assert "TypeError" in told.error


@pytest.mark.parametrize("call", ["rename", "open", "chmod"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_the_disk_refuses_is_an_error_and_the_next_one_is_tried(desk, monkeypatch, call, code):
    first, second = desk.order(1), desk.order(2)
    real = getattr(os, call)

    def refuse(path, *more, **kinds):
        if threading.current_thread().name == "flodl-publish" and not broken_is_over.is_set():
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *more, **kinds)

    broken_is_over = threading.Event()
    monkeypatch.setattr(os, call, refuse)
    desk.publisher.publish(first)
    [told] = desk.wait(1)
    assert os.strerror(code) in told.error
    assert newest(desk.stem).folder is None
    broken_is_over.set()
    desk.publisher.publish(second)
    assert desk.wait(1)[0].error == ""


def test_an_old_one_that_cannot_go_is_said_of_a_checkpoint_that_is_there(desk, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "model-000000000001")

    monkeypatch.setattr(folder, "prune", refuse)
    desk.publisher.publish(desk.order(2))
    [told] = desk.wait(1)
    assert told.folder.endswith("model-000000000002")
    assert told.error == (
        "model-000000000002 is there, but an older one could not be removed:"
        " model-000000000001: Permission denied"
    )


def test_closing_removes_what_was_not_published_and_twice_is_fine(desk):
    desk.publisher.publish(desk.order(1))
    desk.wait(1)
    desk.order(2)
    assert desk.publisher.close(WAIT_S)
    assert desk.publisher.close(WAIT_S)
    assert desk.names() == ["model-000000000001"]


def test_closing_waits_no_longer_than_told(desk, monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    real = folder.publish

    def held(*args):
        begun.set()
        assert gate.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(folder, "publish", held)
    desk.publisher.publish(desk.order(1))
    assert begun.wait(WAIT_S)
    assert not desk.publisher.close(0.0)
    gate.set()
    assert desk.wait(1)[0].error == ""


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(HostUnfit, match=r"cannot save checkpoints: .*No such file"):
        Publisher(tmp_path / "none" / "model", RUN, 1, lambda: None)
