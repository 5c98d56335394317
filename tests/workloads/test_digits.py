"""Digits: a fixed split, and models that learn it."""

from __future__ import annotations

import sys

import pytest
import torch

from flodl_shm import Trainer, workloads
from flodl_shm.errors import BadConfig
from flodl_shm.workloads import digits


def test_the_split_is_fixed_and_complete():
    training, held_out = digits.load()
    assert (len(training), len(held_out)) == (1437, 360)
    images, labels = training.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    assert sorted(labels.unique().tolist()) == list(range(10))
    assert torch.equal(digits.load()[1].tensors[1], held_out.tensors[1])


@pytest.mark.parametrize(("name", "least"), [("digits-mlp", 0.94), ("digits-lenet", 0.97)])
def test_alone_it_learns_the_digits(name, least):
    state = Trainer(**workloads.build(name)).run()
    assert state.evaluation >= least


def test_scoring_leaves_the_model_as_it_was():
    model = digits.make_lenet()
    model[1].eval()
    digits.accuracy(model, digits.load()[1])
    assert model.training
    assert not model[1].training


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadConfig, match="need scikit-learn") as caught:
        workloads.build("digits-mlp")
    assert "flodl_shm[examples]" in caught.value.hint
