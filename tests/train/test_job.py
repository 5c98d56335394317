"""Models and optimizers are built as they were given, or refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.job import Job

CPU = torch.device("cpu")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def job(model=None, optimizer=sgd):
    return Job(model=model, optimizer=optimizer, train_step=lambda m, b: None, dataset=[1])


def test_a_module_is_taken_as_it_is_although_it_can_be_called():
    model = nn.Linear(2, 2)
    assert job(model).build_model(CPU) is model


@pytest.mark.parametrize(
    "factory",
    [
        lambda: nn.Linear(2, 2),
        lambda device: nn.Linear(2, 2, device=device),
        lambda where: nn.Linear(2, 2, device=where),
        lambda width=2, *, device=None: nn.Linear(width, 2, device=device),
    ],
)
def test_a_factory_gets_the_device_if_it_asks(factory):
    assert isinstance(job(factory).build_model(CPU), nn.Linear)


def test_a_factory_of_something_else_is_named():
    with pytest.raises(TypeError, match="the model factory returned list"):
        job(list).build_model(CPU)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(BadConfig, match=r"the model \(ReLU\) has no parameters"):
        job(nn.ReLU()).build_model(CPU)


def test_a_lazy_model_is_refused():
    with pytest.raises(BadConfig, match="'weight' has no shape yet"):
        job(nn.LazyLinear(2)).build_model(CPU)


def test_an_optimizer_instance_is_kept():
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    assert job(model, optimizer).build_optimizer(model) is optimizer


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(BadConfig, match="none of the model's parameters"):
        job(None, sgd(nn.Linear(2, 2).parameters())).build_optimizer(nn.Linear(2, 2))


def test_a_factory_of_no_optimizer_is_named():
    with pytest.raises(TypeError, match="the optimizer factory returned NoneType"):
        job(None, lambda params: None).build_optimizer(nn.Linear(2, 2))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(BadConfig, match="LBFGS calls the model several times"):
        job(None, torch.optim.LBFGS).build_optimizer(nn.Linear(2, 2))
