"""The trained state is a copy, complete, and fits only what it came from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.state import TrainedState


class Tied(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_tied_tensors_come_once_and_scratch_buffers_not_at_all():
    state = TrainedState.of(Tied())
    assert set(state.params) == {"embed.weight", "norm.weight", "norm.bias"}
    assert set(state.buffers) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_the_copy_does_not_follow_the_model():
    model = Tied()
    state = TrainedState.of(model)
    kept = state.params["embed.weight"].clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(state.params["embed.weight"], kept)
    assert not state.params["embed.weight"].requires_grad


def test_load_into_restores_parameters_and_buffers():
    torch.manual_seed(0)
    trained = Tied()
    trained.norm(torch.randn(8, 3))
    fresh = Tied()
    TrainedState.of(trained).load_into(fresh)
    for mine, theirs in zip(
        trained.state_dict().values(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert fresh.head.weight is fresh.embed.weight


def test_a_model_of_another_shape_is_refused_and_untouched():
    other = Tied(width=4)
    before = other.norm.weight.detach().clone()
    with pytest.raises(BadConfig, match=r"'embed.weight' has shape \(5, 4\), the state \(5, 3\)"):
        TrainedState.of(Tied()).load_into(other)
    assert torch.equal(other.norm.weight, before)


def test_a_model_with_other_names_is_refused():
    with pytest.raises(BadConfig, match="'bias' is in only one of them"):
        TrainedState.of(nn.Linear(2, 2)).load_into(nn.Linear(2, 2, bias=False))
