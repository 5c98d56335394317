"""A rank trains one thing at a time, and nothing after it has failed its peers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from flodl_shm.errors import BadConfig
from flodl_shm.train.turnstile import Turnstile

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, Session, attach, grant, job


def fails(model, batch):
    raise KeyError("in the middle")


def test_trainings_follow_one_another():
    turnstile = Turnstile(Session(attach(), FINISH, attach(), FINISH))
    for _ in range(2):
        assert turnstile.train(turnstile.enter(job())).status == "ok"


def test_of_two_at_once_the_second_is_refused():
    refused = []

    def step(model, batch):
        for at_once in (turnstile.enter, in_a_thread):
            with pytest.raises(BadConfig, match="another training is still under way"):
                at_once(job())
            refused.append(at_once)
        return model(batch[0]).mean()

    def in_a_thread(the_job):
        errors = []

        def enter():
            try:
                turnstile.enter(the_job)
            except BadConfig as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        raise errors.pop()

    turnstile = Turnstile(Session(attach(), grant(1, 0), grant(2, 1, ((0, 4),)), FINISH))
    turnstile.train(turnstile.enter(job(train_step=step)))
    assert len(refused) == 2


def test_what_failed_half_way_is_raised_again_instead_of_a_new_beginning():
    turnstile = Turnstile(Session(attach(), grant(1, 0), grant(2, 1, ((0, 4),))))
    with pytest.raises(KeyError, match="in the middle") as first:
        turnstile.train(turnstile.enter(job(train_step=fails)))
    with pytest.raises(KeyError, match="in the middle") as second:
        turnstile.enter(job())
    assert second.value is first.value


def test_what_failed_before_others_knew_of_it_may_be_tried_again():
    def no_model():
        raise OSError("no weights here")

    turnstile = Turnstile(Session(attach(), FINISH))
    with pytest.raises(OSError, match="no weights"):
        turnstile.train(turnstile.enter(job(model=no_model)))
    assert turnstile.train(turnstile.enter(job())).status == "ok"


def test_a_forked_copy_of_the_rank_does_not_train(monkeypatch):
    turnstile = Turnstile(Session())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(BadConfig, match="that a rank has forked cannot train"):
        turnstile.enter(job())
