"""The trained state is a copy, complete, and fits only what it came from."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from flodl_shm.errors import BadConfig, HostUnfit
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


def test_what_is_exported_opens_with_plain_safetensors(tmp_path):
    torch.manual_seed(1)
    model = Tied().to(torch.bfloat16)
    path = TrainedState.of(model).save_pretrained(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "model.safetensors"
    found = load_file(path)
    assert "head.weight" not in found  # tied: once
    for name, tensor in found.items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert tensor.dtype == model.state_dict()[name].dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    fresh = Tied().to(torch.bfloat16)
    load_model(fresh, path)  # knows by the model what is tied
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_an_export_replaces_the_one_before(tmp_path):
    TrainedState.of(nn.Linear(2, 2)).save_pretrained(tmp_path)
    second = TrainedState.of(nn.Linear(3, 3))
    second.save_pretrained(str(tmp_path))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], second.params["weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_to_no_folder_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostUnfit, match=r"cannot write the trained state: .*file: File exists"):
        TrainedState.of(nn.Linear(2, 2)).save_pretrained(tmp_path / "file")


def test_an_export_names_a_tensor_no_file_can_hold(tmp_path):
    state = TrainedState({"mask": torch.eye(2).to_sparse()})
    with pytest.raises(BadConfig, match=r"the state's 'mask' holds a tensor of torch.sparse_coo"):
        state.save_pretrained(tmp_path)


def test_several_may_save_into_one_folder_at_once(tmp_path, monkeypatch):
    """As ranks do whose script goes on after its training; each is a process of its own."""
    state = TrainedState(params={"w": torch.arange(1000.0)})
    real = os.replace

    def replace_after_another_process(partial, path):
        monkeypatch.setattr(os, "replace", real)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        state.save_pretrained(tmp_path)
        real(partial, path)

    monkeypatch.setattr(os, "replace", replace_after_another_process)
    state.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
