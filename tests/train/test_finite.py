"""What is looked at before a mean, and what an optimizer forgets of a window that broke."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flodl_shm.control.mass import REFUSED
from flodl_shm.errors import BadConfig
from flodl_shm.train.finite import Worth, is_finite, mend, weigh
from flodl_shm.train.replica import Replica
from flodl_shm.train.step import Stepper

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_is_seen(dtype, bad):
    for size in (1, 7, 64, 4099):
        for at in {0, size // 2, size - 1}:
            tensor = torch.ones(size, dtype=dtype)
            assert is_finite([tensor])
            tensor[at] = bad
            assert not is_finite([torch.ones(3), tensor])


def test_what_overflows_as_a_sum_is_finite():
    assert is_finite([torch.full((1000,), 3e38), torch.full((1000,), -3e38)])


def test_double_precision_beyond_the_slots_range_is_not():
    assert not is_finite([torch.tensor([1e300], dtype=torch.float64)])


def test_odd_tensors_are_looked_at_too():
    strided = torch.ones(6, 6).t()[1:, ::2]
    assert is_finite([strided, torch.empty(0), torch.tensor(1.0), torch.ones(1, 1).expand(4, 4)])
    strided[2, 1] = math.nan
    assert not is_finite([strided])
    small = torch.ones(4).to(torch.float8_e5m2)
    assert is_finite([small])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x))


def bound(model, *, gap=0.0):
    replica = Replica(model)
    slot = torch.full((replica.layout.grid.floats,), gap)
    replica.bind(slot)
    return replica, slot


@pytest.mark.parametrize("is_bound", [True, False])
def test_the_broken_tensor_is_named_with_what_is_wrong(is_bound):
    model = Net()
    replica = bound(model)[0] if is_bound else Replica(model)
    assert replica.broken() == ""
    model.norm.running_var.data[1] = math.inf
    assert replica.broken() == "buffer norm.running_var is infinite"
    model.out.weight.data[0, 2] = math.nan
    assert replica.broken() == "parameter out.weight is nan"


def test_what_lies_between_the_tensors_is_nobodys():
    replica, slot = bound(Net(), gap=math.nan)
    assert not slot.isfinite().all()
    assert replica.broken() == ""


def test_half_precision_is_looked_at_in_the_slot():
    model = nn.Linear(3, 1).to(torch.float16)
    replica, _ = bound(model)
    model.weight.data.fill_(math.inf)
    replica.arrive()
    assert replica.broken() == "parameter weight is infinite"


def test_buffers_that_begin_without_a_mean_stay_the_ranks_own():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("least", torch.tensor(math.nan))
    model.register_buffer("mean", torch.zeros(3))
    replica, _ = bound(model)
    assert [entry.name for entry in replica.layout.entries] == ["weight", "bias", "mean"]
    assert replica.broken() == ""
    assert torch.equal(model.mask, torch.tensor([0.0, -math.inf]))


def trained(make, *, steps=3):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer, closure


MAKES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1),
}


def all_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from all_tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from all_tensors(one)


@pytest.mark.parametrize("name", MAKES)
def test_a_broken_optimizer_trains_on_with_finite_state(name):
    model, optimizer, closure = trained(MAKES[name])
    good = {key: value.clone() for key, value in model.state_dict().items()}
    for tensor in all_tensors(optimizer.state[model.weight]):
        if tensor.is_floating_point() and tensor.dim():
            tensor.fill_(math.nan)
    assert mend(optimizer) == 1
    model.load_state_dict(good)
    for _ in range(3):
        optimizer.step(closure)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(bool(t.isfinite().all()) for t in all_tensors(dict(optimizer.state)))


def test_what_is_sound_is_left_alone():
    model, optimizer, _ = trained(MAKES["adam"])
    before = {k: v.clone() for k, v in optimizer.state[model.bias].items()}
    optimizer.state[model.weight]["exp_avg"][0, 0] = math.nan
    assert mend(optimizer) == 1
    assert all(torch.equal(optimizer.state[model.bias][k], v) for k, v in before.items())
    weight = optimizer.state[model.weight]
    assert float(weight["step"]) == 0.0, "or the bias correction would be that of many steps"
    assert not weight["exp_avg"].any()
    assert not weight["exp_avg_sq"].any()
    assert mend(optimizer) == 0


def test_a_sound_replica_is_worth_its_steps_and_a_broken_one_nothing():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(model, optimizer, lambda m, batch: m(batch).mean())
    replica, _ = bound(model)
    assert weigh(replica, stepper, 2, 4, 0.5) == Worth(4, 2.0)
    assert weigh(replica, stepper, 2, 0, 0.5) == Worth(0, 0.0)
    stepper.step(torch.full((4, 3), math.nan))
    worth = weigh(replica, stepper, 2, 1, 0.5)
    assert worth == Worth(0, REFUSED, "parameter norm.weight is nan", 2)


def test_before_anything_is_trained_it_is_the_users_model():
    model = Net()
    model.out.bias.data.fill_(math.nan)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).mean())
    with pytest.raises(BadConfig, match=r"parameter out\.bias is nan before anything is trained"):
        weigh(bound(model)[0], stepper, 1, 0, 0.5)
