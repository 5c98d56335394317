"""One optimizer step does what a bare loop does, and says clearly what it cannot use."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flodl_shm.train.step import DeviceLosses, HostLosses, Stepper


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


def mean_square(model, batch):
    return model(batch).square().mean()


def stepper(model, train_step=mean_square, **options):
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), train_step, **options)


def test_steps_equal_a_bare_loop():
    ours, bare = linear(), linear()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    run = stepper(ours)
    for batch in torch.randn(5, 3, 4):
        run.step(batch)
        optimizer.zero_grad()
        mean_square(bare, batch).backward()
        optimizer.step()
    assert torch.equal(ours.weight, bare.weight)


def test_gradients_are_clipped_to_the_norm():
    model = linear()
    before = model.weight.detach().clone(), model.bias.detach().clone()
    stepper(model, lambda m, b: 1000 * m(b).sum(), max_grad_norm=1.0).step(torch.ones(3, 4))
    moved = torch.cat([(model.weight - before[0]).flatten(), model.bias - before[1]])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-4)  # lr times the norm


def test_losses_that_are_not_finite_are_left_out_of_the_sum():
    model = linear()
    losses = iter([2.0, math.nan, 4.0, math.inf])
    run = stepper(model, lambda m, b: m.weight.sum() * 0 + next(losses))
    for _ in range(4):
        run.step(None)
    assert run.take_losses() == (6.0, 2)
    assert run.take_losses() == (0.0, 0)


def test_losses_on_a_device_sum_like_those_on_the_host():
    host, device = HostLosses(), DeviceLosses(torch.device("cpu"))
    for value in (1.5, math.inf, 2.5, math.nan):
        host.add(torch.tensor(value))
        device.add(torch.tensor(value))
    assert host.take() == device.take() == (4.0, 2)
    assert device.take() == (0.0, 0)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType"),
        (1.5, "returned float"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\) and torch.float32"),
        (torch.tensor(1), "returned a tensor of torch.int64"),
        (torch.tensor(1.0), "depends on no trainable parameter"),
    ],
)
def test_something_that_is_no_loss_is_named(returned, words):
    with pytest.raises(TypeError, match=words) as caught:
        stepper(linear(), lambda m, b: returned).step(None)
    assert "test_step.py:" in str(caught.value)  # where the user's function stands


def test_a_callable_object_is_named_by_its_class():
    class Step:
        def __call__(self, model, batch):
            return None

    with pytest.raises(TypeError, match="train_step Step returned NoneType"):
        stepper(linear(), Step()).step(None)
