"""The learning rate follows the global position, whatever kind of scheduler says it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from flodl_shm.errors import BadConfig
from flodl_shm.train.lr import LearningRate, kind_of


def sgd(lr=1.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_without_a_scheduler_the_rate_stays():
    optimizer = sgd(0.3)
    rate = LearningRate(optimizer, None, 2)
    rate.move_to(100)
    assert rate.value == 0.3


def test_a_function_of_the_step_gives_the_absolute_rate():
    rate = LearningRate(sgd(), lambda step: 1 / (1 + step), 2)
    rate.move_to(3)
    assert rate.value == 0.25
    rate.move_to(0)
    assert rate.value == 1.0


def test_a_rate_kept_in_a_tensor_is_filled_not_replaced():
    optimizer = sgd(torch.tensor(1.0))
    held = optimizer.param_groups[0]["lr"]
    LearningRate(optimizer, lambda step: 0.5, 1).move_to(1)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_a_factory_of_a_function_hears_the_world_size():
    rate = LearningRate(sgd(), lambda optimizer, world_size: lambda step: 0.1 * world_size, 4)
    rate.move_to(0)
    assert rate.value == pytest.approx(0.4)


@pytest.mark.parametrize("positions", [range(12), [0, 1, 5, 6, 11], [11]])
def test_a_torch_scheduler_jumps_without_skipping_its_milestones(positions):
    optimizer = sgd()
    rate = LearningRate(optimizer, lambda opt, world: StepLR(opt, 4, gamma=0.1), 1)
    for position in positions:
        rate.move_to(position)
        optimizer.step()
    assert rate.value == pytest.approx(0.01)


def test_a_late_rank_catches_up_before_its_first_step_without_a_warning():
    rate = LearningRate(sgd(), lambda opt, world: StepLR(opt, 10, gamma=0.5), 1)
    rate.move_to(25)
    assert rate.value == 0.25


def test_a_partial_that_lacks_only_the_optimizer_is_a_factory():
    made = functools.partial(CosineAnnealingLR, T_max=10)
    assert kind_of(made) == "of_optimizer"
    rate = LearningRate(sgd(), made, 1)
    rate.move_to(10)
    assert rate.value == pytest.approx(0.0, abs=1e-9)


def test_the_kind_follows_from_the_required_parameters():
    assert kind_of(lambda step, base=0.1: base) == "of_step"
    assert kind_of(lambda optimizer, world_size, extra=1: None) == "of_optimizer_and_world"


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (0.1, "cannot be called"),
        (StepLR, "the class StepLR"),
        (lambda: 0.1, "needs 0 arguments"),
        (lambda a, b, c: 0.1, r"needs 3 arguments \(a, b, c\)"),
        (int, "does not tell its parameters|needs"),
    ],
)
def test_what_is_no_scheduler_is_refused(scheduler, words):
    with pytest.raises(BadConfig, match=words):
        kind_of(scheduler)


def test_a_finished_scheduler_is_refused():
    with pytest.raises(BadConfig, match="finished StepLR"):
        kind_of(StepLR(sgd(), 3))


def test_a_scheduler_that_follows_a_metric_is_refused():
    with pytest.raises(BadConfig, match="follows a metric"):
        LearningRate(sgd(), lambda opt, world: ReduceLROnPlateau(opt), 1)


def test_a_factory_that_returns_nothing_is_refused():
    with pytest.raises(BadConfig, match="returned None"):
        LearningRate(sgd(), lambda opt, world: None, 1)
