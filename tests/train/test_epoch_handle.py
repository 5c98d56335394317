"""The epoch function's second argument: facts of its rank, and wishes about the learning rate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.epoch_handle import EpochHandle


def handle(**changes):
    facts = {
        "rank": 1,
        "world_size": 1,
        "device": torch.device("cpu"),
        "model": nn.Linear(2, 1),
        "current_lr": 0.5,
        "local_step": 30,
        "current_epoch": 3,
        "current_version": 12,
        "latest_metrics": None,
    }
    return EpochHandle(SimpleNamespace(**facts | changes))


def test_it_says_where_the_rank_stands():
    one = handle(world_size=4)
    assert (one.rank, one.world_size, one.device) == (1, 4, torch.device("cpu"))
    assert (one.local_step, one.current_epoch, one.current_version) == (30, 3, 12)
    assert (one.current_lr, one.latest_metrics) == (0.5, None)
    assert isinstance(one.model, nn.Linear)
    assert one.wanted == (None, 1.0)


def test_a_rate_is_set_and_the_last_word_counts():
    one = handle()
    one.scale_lr(0.1)
    one.set_lr(0.25)
    assert one.wanted == (0.25, 1.0)
    one.set_lr(0)
    assert (one.wanted, one.current_lr) == ((0.0, 1.0), 0.0)


def test_factors_multiply_and_the_current_rate_follows():
    one = handle()
    one.scale_lr(0.5)
    one.scale_lr(0.5)
    assert (one.wanted, one.current_lr) == ((None, 0.25), 0.125)
    one.set_lr(8)
    one.scale_lr(0.5)
    assert (one.wanted, one.current_lr) == ((8.0, 0.5), 4.0)


@pytest.mark.parametrize("method", ["set_lr", "scale_lr"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "got -1. It must be finite"),
        (float("nan"), "got nan"),
        (float("inf"), "got inf"),
        ("0.1", "got '0.1'. Give a number"),
        (True, "got True"),
        (None, "got None"),
    ],
)
def test_rates_that_cannot_be(method, value, words):
    one = handle()
    with pytest.raises(BadConfig, match=f"{method} {words}"):
        getattr(one, method)(value)
    assert one.wanted == (None, 1.0)


def test_a_schedule_is_for_a_run_of_one_rank():
    with pytest.raises(BadConfig, match=r"one rank of 3\. Give scheduler= to Trainer"):
        handle(world_size=3).set_scheduler(lambda step: 0.1)
    with pytest.raises(BadConfig, match="a function of the global step alone"):
        handle().set_scheduler(lambda optimizer, world_size: None)
    one = handle()
    one.set_scheduler(schedule := lambda step: 0.1)
    assert one.scheduler is schedule


@pytest.mark.parametrize("method", ["set_lr", "scale_lr", "set_scheduler"])
def test_after_the_function_has_returned_it_is_too_late(method):
    one = handle()
    one.set_lr(0.3)
    one.close(keep=True)
    with pytest.raises(BadConfig, match=f"{method} was called after the epoch function"):
        getattr(one, method)(0.1)
    assert one.wanted == (0.3, 1.0)
    assert one.rank == 1


def test_what_a_failed_function_had_asked_for_is_forgotten():
    one = handle()
    one.set_lr(0.3)
    one.set_scheduler(lambda step: 0.1)
    one.close(keep=False)
    assert (one.wanted, one.scheduler) == ((None, 1.0), None)
