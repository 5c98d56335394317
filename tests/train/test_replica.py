"""What of a model is averaged, where it lives, and that nothing of it stays in the arena."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.train.replica import Replica, write_into
from flodl_shm.wire.layout import TensorFact


class Holder(nn.Module):
    """A module of exactly the tensors a test names."""

    def __init__(self, *, params=None, buffers=None, local=None):
        super().__init__()
        for name, value in (params or {}).items():
            self.register_parameter(name, nn.Parameter(value))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        for name, value in (local or {}).items():
            self.register_buffer(name, value, persistent=False)


def bound(model):
    replica = Replica(model)
    slot = torch.full((max(replica.layout.grid.floats, 1),), 7.0)
    replica.bind(slot)
    return replica, slot


def piece(replica, slot, name):
    entry = next(e for e in replica.layout.entries if e.name == name)
    return slot[entry.offset : entry.offset + entry.numel].view(entry.shape)


def lives_in(tensor, slot):
    return tensor.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()


def test_facts_are_parameters_then_persistent_float_buffers_in_order():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    facts = Replica.facts(model)
    assert [(f.name, f.kind) for f in facts] == [
        ("0.weight", "param"),
        ("0.bias", "param"),
        ("1.weight", "param"),
        ("1.bias", "param"),
        ("1.running_mean", "buffer"),
        ("1.running_var", "buffer"),
    ]
    assert facts[0] == TensorFact("0.weight", (3, 2), "float32", "param")


def test_float32_tensors_live_in_the_slot_with_their_values():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    replica, slot = bound(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert lives_in(value, slot) == value.is_floating_point()
    slot.zero_()
    assert not model[0].weight.any()
    assert torch.equal(piece(replica, slot, "1.running_mean"), torch.zeros(3))


def test_the_optimizers_steps_land_in_the_slot():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    replica, slot = bound(model)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    replica.arrive()
    assert torch.equal(piece(replica, slot, "weight"), before - 0.5)


def test_tied_parameters_are_one_entry_and_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    replica, slot = bound(model)
    assert [e.name for e in replica.layout.entries] == ["a.weight", "a.bias", "b.bias"]
    replica.release()
    assert model["b"].weight is model["a"].weight
    assert not lives_in(model["a"].weight, slot)


def test_two_parameters_over_the_same_memory_are_one_entry_and_stay_tied():
    model = Holder(params={"a": torch.ones(4), "b": torch.zeros(4)})
    model.b.data = model.a.data
    replica, _slot = bound(model)
    assert [e.name for e in replica.layout.entries] == ["a"]
    model.b.data.fill_(5.0)
    assert torch.equal(model.a.data, torch.full((4,), 5.0))
    replica.release()
    model.b.data.fill_(6.0)
    assert torch.equal(model.a.data, torch.full((4,), 6.0))


def test_tying_during_the_run_keeps_one_value():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    replica, slot = bound(model)
    model["b"].weight = model["a"].weight
    for value in (1.5, 2.5):
        model["a"].weight.data.fill_(value)
        replica.arrive()
        assert torch.equal(piece(replica, slot, "a.weight"), torch.full((3, 3), value))
        assert torch.equal(piece(replica, slot, "b.weight"), torch.full((3, 3), value))
    replica.leave()
    replica.release()
    assert model["b"].weight is model["a"].weight
    assert torch.equal(model["a"].weight.data, torch.full((3, 3), 2.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted_both_ways(dtype):
    model = Holder(params={"w": torch.arange(6, dtype=dtype).view(2, 3)})
    replica, slot = bound(model)
    model.w.data.add_(1)
    replica.arrive()
    assert torch.equal(piece(replica, slot, "w"), torch.arange(1.0, 7.0).view(2, 3))
    piece(replica, slot, "w").mul_(2)
    replica.leave()
    assert model.w.dtype == dtype
    assert torch.equal(model.w.data.float(), torch.arange(1.0, 7.0).view(2, 3) * 2)


@pytest.mark.parametrize(
    "value",
    [torch.arange(6.0).view(2, 3).t(), torch.arange(12.0)[::2].view(3, 2)[:, :]],
    ids=["transposed", "strided"],
)
def test_odd_strides_are_copied_by_logical_element(value):
    model = Holder(params={"w": value})
    wanted, strides = value.clone(), value.stride()
    replica, slot = bound(model)
    assert torch.equal(piece(replica, slot, "w"), wanted)
    piece(replica, slot, "w").add_(1)
    replica.leave()
    assert torch.equal(model.w.data, wanted + 1)
    if not value.is_contiguous():
        assert model.w.stride() == strides


def test_channels_last_keeps_its_format():
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    wanted = conv.weight.detach().clone()
    replica, slot = bound(conv)
    assert torch.equal(piece(replica, slot, "weight"), wanted)
    piece(replica, slot, "weight").add_(1)
    replica.leave()
    assert torch.equal(conv.weight.data, wanted + 1)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_scalars_and_empty_tensors_are_ordinary_members():
    model = Holder(params={"s": torch.tensor(3.0), "e": torch.empty(0, 4)})
    replica, slot = bound(model)
    replica.arrive()
    assert piece(replica, slot, "s").item() == 3.0
    piece(replica, slot, "s").fill_(4.0)
    assert model.s.item() == 4.0
    replica.release()
    assert (model.s.item(), tuple(model.e.shape)) == (4.0, (0, 4))
    assert not lives_in(model.s, slot)
    assert not lives_in(model.e, slot)
    assert set(replica.state()) == {"s", "e"}


def test_integer_bool_and_non_persistent_buffers_stay_local():
    model = Holder(
        params={"w": torch.ones(2)},
        buffers={"count": torch.tensor(3), "mask": torch.tensor([True])},
        local={"cache": torch.ones(2)},
    )
    replica, slot = bound(model)
    assert [e.name for e in replica.layout.entries] == ["w"]
    assert not any(lives_in(t, slot) for t in (model.count, model.mask, model.cache))


def test_an_expanded_buffer_is_read_and_written_as_one_value():
    model = Holder(buffers={"scale": torch.ones(1).expand(5)})
    replica, slot = bound(model)
    assert torch.equal(piece(replica, slot, "scale"), torch.ones(5))
    piece(replica, slot, "scale").fill_(3.0)
    replica.leave()
    assert torch.equal(model.scale, torch.full((5,), 3.0))
    assert model.scale.stride() == (0,)


def test_an_element_met_twice_gets_the_first_value():
    windows = torch.zeros(4).unfold(0, 2, 1)  # [[0, 1], [1, 2], [2, 3]] of one memory
    write_into(windows, torch.tensor([[1.0, 2.0], [9.0, 3.0], [9.0, 4.0]]))
    assert windows.tolist() == [[1, 2], [2, 3], [3, 4]]


def test_tensors_that_share_part_of_their_memory_stay_outside_and_consistent():
    memory = torch.arange(6.0)
    model = Holder(buffers={"head": memory[:4], "tail": memory[2:]})
    replica, slot = bound(model)
    assert not lives_in(model.head, slot)
    slot.add_(10)
    replica.leave()
    assert torch.equal(memory, torch.arange(10.0, 16.0))


def test_a_transposed_tie_survives_both_ways():
    model = Holder(params={"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, 2)})
    model.b.data = model.a.data.t()
    replica, slot = bound(model)
    slot.mul_(2)
    replica.leave()
    assert torch.equal(model.b.data, model.a.data.t())
    assert torch.equal(model.a.data, torch.arange(6.0).view(2, 3) * 2)


def test_a_rebound_parameter_is_copied_in_and_bound_again():
    model = nn.Linear(2, 2)
    replica, slot = bound(model)
    model.weight.data = torch.full((2, 2), 9.0)
    model.bias = nn.Parameter(torch.full((2,), 8.0))
    replica.arrive()
    assert torch.equal(piece(replica, slot, "weight"), torch.full((2, 2), 9.0))
    assert torch.equal(piece(replica, slot, "bias"), torch.full((2,), 8.0))
    slot.zero_()
    assert not model.weight.any()
    assert not model.bias.any()


def test_a_parameter_rebound_to_its_own_transpose_is_the_transpose():
    model = Holder(params={"w": torch.arange(9.0).view(3, 3)})
    replica, slot = bound(model)
    model.w.data = model.w.data.t()
    replica.arrive()
    assert torch.equal(piece(replica, slot, "w"), torch.arange(9.0).view(3, 3).t())


def test_a_model_turned_to_half_during_the_run_is_copied_from_then_on():
    model = nn.Linear(2, 2)
    replica, slot = bound(model)
    model.half()
    replica.arrive()
    slot.fill_(2.0)
    replica.leave()
    assert torch.equal(model.weight.data, torch.full((2, 2), 2.0, dtype=torch.float16))


def test_a_frozen_parameter_is_an_ordinary_member():
    model = nn.Linear(2, 2)
    replica, slot = bound(model)
    model.weight.requires_grad_(False)
    replica.arrive()
    slot.zero_()
    assert not model.weight.any()
    assert not model.weight.requires_grad


def test_a_changed_shape_and_a_removed_parameter_are_named():
    model = nn.Linear(2, 2)
    replica, _ = bound(model)
    model.weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(BadConfig, match=r"weight had shape \(2, 2\).* \(3, 2\) now"):
        replica.arrive()
    model.weight = None
    with pytest.raises(BadConfig, match="weight was there"):
        replica.arrive()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.LazyLinear(2), "weight has no shape yet"),
        (Holder(params={"c": torch.ones(2, dtype=torch.complex64)}), "c is complex"),
        (Holder(buffers={"s": torch.eye(2).to_sparse()}), "s is torch.sparse_coo"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    ],
    ids=["lazy", "complex", "sparse", "meta"],
)
def test_what_cannot_be_averaged_is_named(model, says):
    with pytest.raises(BadConfig, match=says):
        Replica.facts(model)


def test_after_release_nothing_is_in_the_arena_and_values_are_kept():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("alias", torch.zeros(3), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica, slot = bound(model)
    model.alias = model[0].bias.data  # the user's own view into the slot
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    replica.release()
    slot.fill_(float("nan"))
    assert all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items())
    assert not lives_in(model.alias, slot)
    assert torch.isfinite(model.alias).all()
    group = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(group, model.parameters(), strict=True))
    replica.release()  # once more is harmless


def test_a_double_parameter_keeps_its_last_bits_through_release():
    third = torch.full((1,), 1 / 3, dtype=torch.float64)
    model = Holder(params={"w": third.clone()})
    replica, _ = bound(model)
    replica.release()
    assert torch.equal(model.w.data, third)


def test_state_and_digest_follow_values_and_names():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    a, slot = bound(one)
    b = Replica(other)
    assert a.sha256() == b.sha256()
    copied = a.state()
    assert list(copied) == ["weight", "bias"]
    slot.zero_()
    assert copied["weight"].any()
    assert a.sha256() != b.sha256()
    assert Replica(nn.ModuleDict({"x": other})).sha256() != b.sha256()


def grow_a_layer(model):
    model.add_module("late", nn.Linear(2, 2))


def grow_deep_inside(model):
    model[1].add_module("2", nn.Linear(2, 2, bias=False))


def register(model):
    model[0].register_parameter("extra", nn.Parameter(torch.ones(2)))


def fill_an_empty_place(model):
    model[1][0].bias = nn.Parameter(torch.ones(2))


def replace_a_layer(model):
    model[0] = nn.Linear(2, 2)


def nested():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (grow_a_layer, "late.weight"),
        (grow_deep_inside, "1.2.weight"),
        (register, "0.extra"),
        (fill_an_empty_place, "1.0.bias"),
        (replace_a_layer, "0.weight"),
    ],
)
def test_a_parameter_that_was_not_there_when_the_run_began_is_named(change, name):
    model = nested()
    replica, _ = bound(model)
    replica.arrive()
    change(model)
    with pytest.raises(BadConfig, match=f"^parameter {name} was not there when the run began"):
        replica.arrive()


def test_modules_without_new_parameters_may_come_and_go():
    model = nested()
    replica, _ = bound(model)
    model[1][1] = nn.Tanh()
    model.add_module("wrapped", nn.Sequential(model[0], nn.Dropout()))
    replica.arrive()
    replica.arrive()
    register(model)
    with pytest.raises(BadConfig, match="extra"):
        replica.arrive()


def test_without_a_slot_arriving_and_leaving_do_nothing():
    model = nn.Linear(2, 2)
    replica = Replica(model)
    before = replica.sha256()
    replica.arrive()
    replica.leave()
    replica.release()
    assert replica.sha256() == before


def test_a_slot_too_short_and_a_foreign_layout_are_our_bug():
    replica = Replica(nn.Linear(2, 2))
    with pytest.raises(WeBroke, match="slot of 3 floats"):
        replica.bind(torch.zeros(3))
    with pytest.raises(WeBroke, match="not this model's"):
        Replica(nn.Linear(2, 2, bias=False), replica.layout)
