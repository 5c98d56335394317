"""The learning rate follows the global position, whatever kind of scheduler says it."""

from __future__ import annotations

import functools
import json

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


# ---- adjusted by the run ----------------------------------------------------------------------


def groups(*rates):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in rates]
    return torch.optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)], lr=1.0
    )


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_a_scale_multiplies_what_each_group_had_and_replaces_the_one_before():
    optimizer = groups(0.1, 0.4)
    rate = LearningRate(optimizer, None, 1)
    rate.adjust(None, 0.5)
    assert rates_of(optimizer) == [0.05, 0.2]
    rate.adjust(None, 2.0)
    rate.move_to(7)
    assert rates_of(optimizer) == [0.2, 0.8]
    rate.adjust(None, 1.0)
    assert rates_of(optimizer) == [0.1, 0.4]


def test_a_rate_that_is_said_holds_for_every_group_whatever_the_schedule():
    optimizer = groups(0.1, 0.4)
    rate = LearningRate(optimizer, lambda step: 1.0 / (1 + step), 1)
    rate.adjust(0.3, 0.5)
    rate.move_to(9)
    assert rates_of(optimizer) == [0.15, 0.15]
    rate.adjust(None, 0.5)
    rate.move_to(9)
    assert rates_of(optimizer) == [0.05, 0.05]


@pytest.mark.parametrize("moments", [(0,), (3,), (5, 9)])
def test_a_torch_scheduler_goes_on_beneath_an_adjustment(moments):
    """It works from the last value in the optimizer, which must not be the adjusted one."""
    plain, adjusted = sgd(), sgd()
    schedule = LearningRate(plain, lambda opt, world: StepLR(opt, 4, gamma=0.5), 1)
    rate = LearningRate(adjusted, lambda opt, world: StepLR(opt, 4, gamma=0.5), 1)
    for position in range(14):
        if position in moments:
            rate.adjust(None, 0.25)
        for one, optimizer in ((schedule, plain), (rate, adjusted)):
            one.move_to(position)
            optimizer.step()
        scale = 0.25 if position >= moments[0] else 1.0
        assert rate.value == schedule.value * scale
    rate.adjust(None, 1.0)
    assert rate.value == schedule.value


def test_another_function_of_the_step_takes_the_schedulers_place():
    optimizer = sgd()
    rate = LearningRate(optimizer, lambda opt, world: StepLR(opt, 4, gamma=0.5), 1)
    rate.follow(lambda step: 0.01 * step)
    rate.move_to(5)
    assert rate.value == pytest.approx(0.05)


# ---- saved and resumed ------------------------------------------------------------------------

FACTORIES = {
    "step": lambda opt, world: StepLR(opt, 4, gamma=0.5),
    "cosine": lambda opt, world: CosineAnnealingLR(opt, T_max=30),
    "none": None,
    "function": lambda step: 1.0 / (1 + step),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_resumed_rate_goes_on_as_if_nothing_had_been(name, scale):
    def run(rate, optimizer, positions):
        values = []
        for position in positions:
            rate.move_to(position)
            optimizer.step()
            values.append(rate.value)
        return values

    optimizer = sgd()
    rate = LearningRate(optimizer, FACTORIES[name], 1)
    if scale != 1.0:
        rate.adjust(None, scale)
    run(rate, optimizer, range(10))
    saved, groups_saved = json.loads(json.dumps(rate.state())), optimizer.state_dict()
    rest = run(rate, optimizer, range(10, 25))

    fresh = sgd()
    resumed = LearningRate(fresh, FACTORIES[name], 1)
    fresh.load_state_dict(groups_saved)
    resumed.resume(saved)
    if scale != 1.0:
        resumed.adjust(None, scale)
    assert run(resumed, fresh, range(10, 25)) == rest


def test_a_scheduler_that_was_not_there_before_catches_up():
    saved = sgd(0.9).state_dict()
    optimizer = sgd()
    rate = LearningRate(optimizer, FACTORIES["step"], 1)
    optimizer.load_state_dict(saved)
    rate.resume(None)
    rate.move_to(9)
    assert rate.value == 0.25
