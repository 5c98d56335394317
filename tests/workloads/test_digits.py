"""Digits: a fixed split, and models that learn it."""

from __future__ import annotations

import sys

import pytest
import torch

from flodl_shm import Trainer, workloads
from flodl_shm.errors import BadConfig
from flodl_shm.workloads import digits, digits_models


def test_the_split_is_fixed_and_complete():
    training, held_out = digits.load()
    assert (len(training), len(held_out)) == (1437, 360)
    images, labels = training.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    assert sorted(labels.unique().tolist()) == list(range(10))
    assert torch.equal(digits.load()[1].tensors[1], held_out.tensors[1])


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("digits-logistic", 0.93),
        ("digits-mlp", 0.94),
        ("digits-lenet", 0.97),
        ("digits-resnet", 0.97),
        ("digits-ae", -0.02),  # the mean image alone scores -0.073
    ],
)
def test_alone_it_learns_the_digits(name, least):
    state = Trainer(**workloads.build(name)).run()
    assert state.evaluation >= least


@pytest.mark.parametrize("name", ["digits-resnet", "digits-ae"])
def test_the_same_seed_gives_the_same_model(name):
    first, again, other = (
        Trainer(**workloads.build(name) | {"epochs": 1, "seed": seed}).run() for seed in (7, 7, 8)
    )
    names = list(first.params)
    assert all(torch.equal(first.params[one], again.params[one]) for one in names)
    assert not all(torch.equal(first.params[one], other.params[one]) for one in names)


def test_the_autoencoder_keeps_a_fifth_of_the_numbers():
    images = digits.load()[1].tensors[0]
    model = digits_models.make_autoencoder()
    assert model(images).shape == images.shape
    assert model[:4](images).shape == (len(images), digits_models.CODE)


def test_nothing_done_to_the_residual_branch_hides_the_input():
    block = digits_models.Residual(4).eval()
    torch.nn.init.zeros_(block.body[-1].weight)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("score", [digits.accuracy, digits.fidelity])
def test_scoring_leaves_the_model_as_it_was(score):
    model = digits_models.make_lenet()
    if score is digits.fidelity:
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.BatchNorm2d(1))
    model[1].eval()
    score(model, digits.load()[1])
    assert model.training
    assert not model[1].training


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadConfig, match="need scikit-learn") as caught:
        workloads.build("digits-mlp")
    assert "flodl_shm[examples]" in caught.value.hint
