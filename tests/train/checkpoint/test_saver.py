"""Saving: copies at once, files by a thread, and nothing that goes wrong reaches the training."""

from __future__ import annotations

import builtins
import errno
import os
import threading

import pytest
import torch
from checkpoint_rig import RUN, meta
from torch import nn

from flodl_shm.control.messages import PartSaved, Save
from flodl_shm.train.checkpoint import saver as saver_module
from flodl_shm.train.checkpoint.durable import make_folder
from flodl_shm.train.checkpoint.folder import publish
from flodl_shm.train.checkpoint.manifest import verify
from flodl_shm.train.checkpoint.names import MODEL, work_folder
from flodl_shm.train.checkpoint.saver import Saver
from flodl_shm.train.checkpoint.tensors import TensorFile

WAIT_S = 20.0


class Desk:
    """A saver of rank 1, what it has sent, and a model to save."""

    def __init__(self, stem):
        self.stem = stem
        self.sent = []
        self.ticks = iter(range(0, 10**9, 1000))
        self.saver = Saver(self.folder, 1, self.sent.append, self.ticks.__next__)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def folder(self, save):
        return work_folder(self.stem, RUN, save)

    def save(self, number=1, *, has_model=True, **more):
        order = Save(rank=1, save=number, after=5, epoch=0, has_model=has_model)
        told = {"model": self.model, "optimizer": self.optimizer, "scheduler_state": None}
        self.saver.save(order, **(told | more), row=2)

    def end(self):
        assert self.saver.join(WAIT_S)
        return self.sent


@pytest.fixture
def desk(stem):
    return Desk(stem)


def test_the_holder_writes_model_and_its_own_state_and_says_what(desk):
    desk.save()
    [told] = desk.end()
    assert (told.rank, told.row, told.save, told.error) == (1, 2, 1, "")
    assert told.elapsed_ns > 0
    assert [f.name for f in told.files] == [
        "model.safetensors",
        "optimizer-rank1.safetensors",
        "optimizer-rank1.json",
    ]
    assert verify(publish(desk.stem, desk.folder(1), meta(), told.files))


def test_the_others_write_their_own_state_alone(desk):
    desk.save(has_model=False)
    [told] = desk.end()
    assert [f.name for f in told.files] == ["optimizer-rank1.safetensors", "optimizer-rank1.json"]


def test_what_is_trained_after_the_order_is_not_in_it(desk, monkeypatch):
    gate = threading.Event()
    made = saver_module.make_folder

    def held(folder):
        assert gate.wait(WAIT_S)
        made(folder)

    monkeypatch.setattr(saver_module, "make_folder", held)
    before = desk.model[0].weight.detach().clone()
    desk.save()
    with torch.no_grad():
        desk.model[0].weight.add_(1)
    assert desk.sent == []
    gate.set()
    [told] = desk.end()
    assert told.error == ""
    with TensorFile(desk.folder(1) / MODEL) as file:
        assert torch.equal(file.get("0.weight"), before)


def test_saves_queue_and_the_oldest_of_three_waiting_is_given_up(desk, monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    made = saver_module.make_folder

    def held(folder):
        begun.set()
        assert gate.wait(WAIT_S)
        made(folder)

    monkeypatch.setattr(saver_module, "make_folder", held)
    desk.save(1)
    assert begun.wait(WAIT_S)
    for number in (2, 3):
        desk.save(number)
    assert desk.sent == []
    desk.save(4)
    assert not desk.saver.join(0.0)
    [late] = desk.sent
    assert (late.save, late.files) == (2, ())
    assert "the disk is too slow: 2 newer saves are waiting already" in late.error
    gate.set()
    assert [(p.save, p.error) for p in desk.end()[1:]] == [(1, ""), (3, ""), (4, "")]


def test_join_with_nothing_to_do_returns_at_once(desk):
    assert desk.saver.join(0.0)


def test_a_second_save_after_the_first_has_ended(desk):
    desk.save(1)
    desk.end()
    desk.save(2)
    assert [part.error for part in desk.end()] == ["", ""]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "mkdir"])
def test_whatever_the_disk_refuses_becomes_an_answer(desk, monkeypatch, call, code):
    make_folder(desk.stem.parent)
    real = getattr(os, call)

    def refuse(path, *more, **kinds):
        if threading.current_thread().name.startswith("flodl-save"):
            raise OSError(code, os.strerror(code), *([] if call in ("write", "fsync") else [path]))
        return real(path, *more, **kinds)

    monkeypatch.setattr(os, call, refuse)
    desk.save()
    [told] = desk.end()
    assert told.files == ()
    assert told.error.startswith("nothing was saved: cannot write /")
    assert told.error.endswith(f": {os.strerror(code)}")
    monkeypatch.undo()
    if desk.folder(1).exists():
        assert [path.name for path in desk.folder(1).iterdir()] == []
    desk.save(2)
    assert desk.end()[1].error == ""


def test_a_file_in_the_place_of_the_folder_becomes_an_answer(desk):
    desk.stem.parent.mkdir()
    desk.folder(1).write_text("")
    desk.save()
    [told] = desk.end()
    assert "File exists" in told.error


def test_no_memory_for_the_copies_becomes_an_answer(desk, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(saver_module, "copy_own", refuse)
    desk.save()
    [told] = desk.end()
    assert told == PartSaved(
        rank=1, row=2, save=1, elapsed_ns=1000, error="nothing was saved: not enough memory"
    )


def test_torchs_own_words_for_no_memory_become_an_answer(desk):
    desk.optimizer.state_dict = lambda: {"state": {0: {"x": torch.empty(1).expand(2**60)}}}
    desk.save()
    [told] = desk.end()
    assert told.error.startswith("nothing was saved: RuntimeError: ")


class Foo:
    pass


def test_an_odd_state_becomes_an_answer_that_names_it(desk):
    desk.optimizer.state[desk.model[0].weight]["exp_avg"] = Foo()
    desk.save()
    [told] = desk.end()
    assert told.error == (
        "nothing was saved: optimizer state of 'exp_avg' holds a Foo, which no file can hold"
    )


def test_a_state_without_an_end_becomes_an_answer(desk):
    loop = []
    loop.append(loop)
    desk.save(scheduler_state={"x": loop})
    [told] = desk.end()
    assert "RecursionError" in told.error


def test_no_model_where_one_is_wanted_becomes_an_answer(desk):
    desk.save(model=None)
    desk.save(2, model=None, has_model=False)
    assert [part.error for part in desk.end()] == [
        "nothing was saved: there is no model at hand",
        "",
    ]


def test_a_thread_whose_answer_nobody_takes_goes_on(desk, monkeypatch):
    taken = []

    def send(part):
        if not taken:
            taken.append(part)
            raise builtins.RuntimeError("the launcher is gone")
        taken.append(part)

    monkeypatch.setattr(desk.saver, "_send", send)
    desk.save(1)
    assert desk.saver.join(WAIT_S)
    desk.save(2)
    assert desk.saver.join(WAIT_S)
    assert [part.save for part in taken] == [1, 2]


@pytest.mark.procs
def test_a_disk_that_is_full_becomes_an_answer_and_leaves_nothing_half_written(mounted):
    desk = Desk(mounted / "ckpt" / "model")
    large = nn.Linear(1024, 1024)
    desk.save(model=large, optimizer=torch.optim.SGD(large.parameters()))
    [told] = desk.end()
    assert told.error.endswith(f"{desk.folder(1) / MODEL}: No space left on device")
    assert list(desk.folder(1).iterdir()) == []
    desk.save(2)
    assert desk.end()[1].error == ""
