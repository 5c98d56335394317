"""A publisher is SIGKILLed before each of its system calls, and in the middle of each write.

At every instant there is a whole checkpoint to be found, and afterwards nothing that is none. The
killed one is a fork of this process, whose os module counts: so each step is hit for certain.
"""

from __future__ import annotations

import os
import random
import signal

import pytest
from checkpoint_rig import RUN, publish_one

from flodl_shm.train.checkpoint import folder
from flodl_shm.train.checkpoint.find import newest
from flodl_shm.train.checkpoint.manifest import verify
from flodl_shm.train.checkpoint.names import MODEL, is_final, work_folder
from flodl_shm.train.checkpoint.owner import Owner, sweep

STEPS = ("open", "fsync", "close", "replace", "rename", "mkdir", "rmdir", "unlink", "chmod")

pytestmark = pytest.mark.procs


def killed_at(number, act):
    """Run `act` in a child that dies right before its number-th step; False if it never did."""
    pid = os.fork()
    if pid == 0:
        try:
            count_down(number)
            act()
            os._exit(0)
        except BaseException as error:
            os._write_for_test(2, f"{error!r}\n".encode())
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def count_down(number):
    left = [number]

    def tick():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real):
        def call(*args, **kinds):
            tick()
            return real(*args, **kinds)

        return call

    real_write = os.write

    def write(fd, data):
        tick()
        half = len(data) // 2
        real_write(fd, data[:half])
        tick()
        real_write(fd, data[half:])
        return len(data)

    os._write_for_test = real_write
    os.write = write
    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def every_step(stem, prepare, act, check):
    """Kill `act` at its first step, its second ... until it gets through; `check` each time."""
    number = 0
    while True:
        number += 1
        assert number < 1000
        clean(stem)
        told = prepare()
        is_killed = killed_at(number, act)
        check(told)
        sweep(stem)
        check(told)
        strange = [p for p in stem.parent.iterdir() if not is_final(stem, p.name)]
        assert strange == []
        assert not [p for p in stem.parent.iterdir() if p.name.endswith(".old")]
        if not is_killed:
            return number


def clean(stem):
    if stem.parent.exists():
        for path in stem.parent.iterdir():
            folder.remove_tree(path)


def as_a_run(stem, run, work):
    """What a launcher does around its publishing."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    owner = Owner(stem, run)
    work()
    owner.release()


def model_of(found):
    return (found.folder / MODEL).read_bytes()[-1]


def test_a_new_checkpoint_is_whole_or_invisible_and_the_one_before_stays(stem):
    def act():
        as_a_run(stem, "second", lambda: publish_one(stem, 2, run="second"))

    def check(before):
        found = newest(stem)
        assert found.skipped == ()
        assert found.folder.name in ("model-000000000001", "model-000000000002")
        assert verify(before)

    assert every_step(stem, lambda: publish_one(stem, 1), act, check) > 40


def test_the_first_checkpoint_is_whole_or_invisible(stem):
    def act():
        as_a_run(stem, "second", lambda: publish_one(stem, 2, run="second"))

    def check(_):
        found = newest(stem)
        assert found.skipped == ()
        assert found.folder is None or verify(found.folder)

    every_step(stem, lambda: stem.parent.mkdir(exist_ok=True), act, check)


def test_pruning_never_takes_the_newest_or_leaves_a_half(stem):
    def prepare():
        for step in (1, 2, 3):
            made = publish_one(stem, step, save=step)
        return made

    def act():
        work = work_folder(stem, "second", 1)

        def body():
            made = publish_one(stem, 4, run="second")
            folder.prune(stem, work, 1, besides=made)

        as_a_run(stem, "second", body)

    def check(before):
        found = newest(stem)
        assert found.skipped == ()
        assert found.folder.name in ("model-000000000003", "model-000000000004")
        if found.folder == before:
            assert len(list(stem.parent.glob("model-????????????"))) == 3

    every_step(stem, prepare, act, check)


def test_a_replaced_checkpoint_is_the_old_one_or_the_new_one(stem):
    def act():
        as_a_run(stem, "second", lambda: publish_one(stem, 1, run="second", value=b"b"))

    seen = set()

    def check(_):
        found = newest(stem)
        assert found.skipped == ()
        seen.add(model_of(found))

    every_step(stem, lambda: publish_one(stem, 1, value=b"a"), act, check)
    assert seen == {ord("a"), ord("b")}


def test_a_broken_one_in_the_way_does_not_hide_the_one_before(stem):
    def prepare():
        before = publish_one(stem, 1)
        (publish_one(stem, 2, save=2) / MODEL).write_bytes(b"cut")
        return before

    def act():
        as_a_run(stem, "second", lambda: publish_one(stem, 2, run="second"))

    def check(before):
        assert verify(before)
        assert newest(stem).folder is not None

    every_step(stem, prepare, act, check)


def test_a_killed_sweep_is_finished_by_the_next_one(stem):
    def prepare():
        made = publish_one(stem, 1)
        killed_at(25, lambda: publish_one(stem, 2, run="second"))
        os.rename(publish_one(stem, 3, save=2), stem.parent / "model-000000000003.old")
        assert work_folder(stem, "second", 1).exists()
        return made

    def check(made):
        assert verify(made)
        assert newest(stem).folder.name.startswith("model-000000000003")

    every_step(stem, prepare, lambda: sweep(stem), check)


def test_a_run_killed_anywhere_again_and_again_loses_nothing_published(stem):
    """Twenty launchers in a row, each killed at a random step of publishing in a loop."""
    draw = random.Random(7)
    last = 0
    for life in range(20):
        run = f"life{life}"

        def act(run=run, first=last):
            sweep(stem)
            stem.parent.mkdir(parents=True, exist_ok=True)
            Owner(stem, run)
            for save in range(1, 50):
                work = work_folder(stem, run, save)
                made = publish_one(stem, first + save, save=save, run=run)
                folder.prune(stem, work, 2, besides=made)

        assert killed_at(draw.randint(1, 400), act)
        found = newest(stem)
        assert found.skipped == ()
        step = found.meta.global_step if found.meta else 0
        assert step >= last
        last = step
    assert last > 20
    sweep(stem)
    assert len(list(stem.parent.iterdir())) <= 3
    assert RUN not in str(list(stem.parent.iterdir()))
