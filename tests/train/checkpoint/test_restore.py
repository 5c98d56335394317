"""Restoring: training goes on bit for bit, what does not fit is named, nothing read is run."""

from __future__ import annotations

import json
import os
import pickle
import random

import numpy as np
import pytest
import torch
from restore_rig import Net, alike, bring_back, save, step
from torch import nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import write_durably
from flodl_shm.train.checkpoint.find import load, newest
from flodl_shm.train.checkpoint.manifest import Manifest, encode, read_manifest
from flodl_shm.train.checkpoint.names import MODEL
from flodl_shm.train.replica import Replica
from flodl_shm.train.seeds import seed_everything

optim = torch.optim


def adam(model):
    return optim.Adam(model.parameters(), lr=0.01)


def test_values_are_copied_into_the_memory_the_model_has(stem):
    """Parameters are views of shared memory, and must stay so."""
    model = Net()
    folder = save(stem, model, adam(model))
    other = Net()
    replica = Replica(other)
    slot = torch.zeros(replica.layout.grid.floats)
    replica.bind(slot)
    address = other.body.weight.data_ptr()
    bring_back(folder, other, adam(other))
    assert other.body.weight.data_ptr() == address
    assert torch.equal(other.body.weight, model.body.weight)
    assert slot.untyped_storage().data_ptr() == other.body.weight.untyped_storage().data_ptr()


def test_random_numbers_go_on_only_on_the_rank_they_are_of(stem):
    model = Net()
    folder = save(stem, model, adam(model))
    expected = (torch.rand(1), np.random.rand(), random.random())
    for rank, state_of in ((1, 0), (0, None)):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        found = bring_back(folder, model, adam(model), rank=rank, state_of=state_of)
        assert not found.rng
        assert torch.equal(torch.get_rng_state(), before)
    assert bring_back(folder, model, adam(model)).rng
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_a_missing_optimizer_file_is_a_fresh_state_and_said(stem):
    model = Net()
    optimizer = adam(model)
    step(model, optimizer)
    folder = save(stem, model, optimizer)
    fresh = adam(model)
    found = bring_back(folder, model, fresh, rank=1, state_of=1)
    assert not found.rng
    assert found.scheduler is None
    assert fresh.state_dict()["state"] == {}
    [note] = found.notes
    assert "there is no optimizer-rank1.json" in note
    assert "the optimizer of rank 1 is fresh" in note


def test_what_is_no_average_is_the_ranks_own(stem):
    model = Net()
    optimizer = adam(model)
    step(model, optimizer)
    folder = save(stem, model, optimizer)
    other = Net()
    bring_back(folder, other, adam(other))
    assert (other.seen.item(), other.norm.num_batches_tracked.item()) == (8, 1)


class Extra(nn.Linear):
    """Keeps something in its state_dict that is no tensor."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale, "history": torch.ones(2) * self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_state_comes_back(stem):
    model = nn.Sequential(Extra(2, 2))
    model[0].scale = 2.5
    folder = save(stem, model, adam(model))
    other = nn.Sequential(Extra(2, 2))
    bring_back(folder, other, adam(other))
    assert other[0].scale == 2.5
    plain = save(stem, nn.Sequential(nn.Linear(2, 2)), adam(model), number=2, step_number=2)
    assert bring_back(plain, other, adam(other)).notes == (
        "the checkpoint has no extra state of 0",
    )


def changed(**attributes):
    def build():
        model = Net()
        for name, value in attributes.items():
            setattr(model, name, value)
        return model

    return build


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (changed(more=nn.Linear(1, 1)), r"of 'more.bias' it is not in it"),
        (changed(body=nn.Linear(4, 4, bias=False)), "of 'body.bias' the model has none"),
        (lambda: Net(5), "'embed.weight' is 6x5 float32 in the model and 6x4 float32 in it"),
        (changed(body=nn.Linear(4, 4).double()), "'body.weight' is 4x4 float64 in the model and"),
    ],
)
def test_another_model_is_refused_by_the_first_difference_and_untouched(stem, build, text):
    model = Net()
    folder = save(stem, model, adam(model))
    other = build()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(BadConfig, match=text):
        bring_back(folder, other, adam(other))
    assert alike(other.state_dict(), before)


def test_tied_where_it_was_not_is_refused_and_the_other_way_is_fine(stem):
    tied = Net()
    loose = Net()
    loose.head.weight = nn.Parameter(torch.randn(6, 4))
    folder = save(stem, tied, adam(tied))
    bring_back(folder, loose, optim.SGD(tied.parameters()), state_of=None)
    assert torch.equal(loose.head.weight, tied.embed.weight)
    assert torch.equal(loose.embed.weight, tied.embed.weight)
    folder = save(stem, loose, adam(loose), number=2, step_number=2)
    with pytest.raises(BadConfig, match=r"'head.weight' and 'embed.weight' are one tensor in the"):
        bring_back(folder, tied, adam(tied))


def two_groups(model):
    every = list(model.parameters())
    return optim.Adam([{"params": every[:2]}, {"params": every[2:]}])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda m: optim.SGD(m.parameters()), r"the optimizer is SGD, the one in .* was Adam"),
        (two_groups, r"has 2 parameter groups, the one in .* had 1"),
        (lambda m: optim.Adam(list(m.parameters())[:2]), r"has 2 parameters, in .* it had 5"),
        (
            lambda m: optim.Adam(list(m.parameters())[::-1]),
            r"group 0 of the optimizer has 'body.bias' \[4\] where in .* it had 'embed.weight' \[6",
        ),
    ],
)
def test_another_optimizer_is_refused_naming_both_and_nothing_is_changed(stem, build, text):
    model = Net()
    folder = save(stem, model, adam(model))
    other = Net()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(BadConfig, match=text):
        bring_back(folder, other, build(other))
    assert alike(other.state_dict(), before)


def overwrite(folder, name, body):
    """Put other bytes there with a manifest that fits them."""
    told = write_durably(folder, name, [body])
    old = read_manifest(folder)
    files = (*(file for file in old.files if file.name != name), told)
    (folder / "manifest.json").write_bytes(encode(Manifest(files=files, serial=old.serial)))


class Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "name",
    [MODEL, "optimizer-rank0.safetensors", "optimizer-rank0.json", "meta.json", "manifest.json"],
)
def test_a_prepared_pickle_is_refused_and_never_run(stem, tmp_path, name):
    model = Net()
    folder = save(stem, model, adam(model))
    marker = tmp_path / "marker"
    bodies = [pickle.dumps(Marker(str(marker)), protocol) for protocol in (0, 2, 5)]
    torch.save(Marker(str(marker)), tmp_path / "zip")
    for body in [*bodies, (tmp_path / "zip").read_bytes()]:
        if name == "manifest.json":
            (folder / name).write_bytes(body)
        else:
            overwrite(folder, name, body)
        if name == "optimizer-rank0.json":  # the launcher does not look into it: the rank does
            assert newest(stem).folder == folder
        else:
            assert newest(stem).folder is None
            with pytest.raises(BadConfig):
                load(folder)
        if name.startswith(("model", "optimizer")):
            with pytest.raises(BadConfig):
                bring_back(folder, Net(), adam(model))
    assert not marker.exists()


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        '{"schema": "x"}',
        '{"schema": 1}',
        '{"schema": 1, "class": "Adam", "groups": [], "optimizer": {}, "rng": {}, "scheduler": 0}',
        '{"schema": 1, "class": {"$": "os.system", "name": "true"}}',
        '{"schema": 9}',
        "[" * 100_000,
    ],
)
def test_a_damaged_own_state_is_refused(stem, body):
    model = Net()
    folder = save(stem, model, adam(model))
    (folder / "optimizer-rank0.json").write_text(body)
    with pytest.raises(BadConfig):
        bring_back(folder, model, adam(model))


@pytest.mark.parametrize(
    ("key", "value"),
    [("rng", {}), ("rng", {"torch": 1, "numpy": {}, "python": []}), ("optimizer", {"state": {}})],
)
def test_damaged_parts_of_it_are_refused(stem, key, value):
    model = Net()
    folder = save(stem, model, adam(model))
    path = folder / "optimizer-rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    before = random.getstate()
    with pytest.raises(BadConfig):
        bring_back(folder, model, adam(model))
    random.setstate(before)


def test_whatever_somebody_writes_into_it_only_our_errors_come_out(stem):
    """Bytes changed at random, and random parts replaced: refused, or brought back as it was."""
    draw = random.Random(11)
    seed_everything(11)
    model = Net()
    optimizer = adam(model)
    step(model, optimizer)
    folder = save(stem, model, optimizer)
    names = ("optimizer-rank0.json", "optimizer-rank0.safetensors", MODEL)
    bodies = {name: (folder / name).read_bytes() for name in names}
    refused = 0
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()
    for _ in range(300):
        name = draw.choice(names)
        body = bytearray(bodies[name])
        near = len(body) if name.endswith("json") else 400  # the header is what is parsed
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(min(len(body), near))
            body[at] = draw.choice([0, 0xFF, *b'0{}[]",:9e', body[at] ^ 1])
        (folder / name).write_bytes(body)
        try:
            bring_back(folder, Net(), adam(Net()))
        except BadConfig:
            refused += 1
        (folder / name).write_bytes(bodies[name])
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    np.random.set_state(before[2])
    assert refused > 100


def leaves(value, path=()):
    """Every place in nested JSON."""
    yield path
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in inner:
            yield from leaves(one, (*path, key))


def test_any_part_of_it_may_be_another_value(stem):
    draw = random.Random(12)
    seed_everything(12)
    model = Net()
    optimizer = adam(model)
    step(model, optimizer)
    path = save(stem, model, optimizer) / "optimizer-rank0.json"
    text = path.read_text()
    places = [p for p in leaves(json.loads(text)) if p and "python" not in p[:2]]
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()
    for _ in range(200):
        told = json.loads(text)
        *way, last = draw.choice(places)
        spot = told
        for key in way:
            spot = spot[key]
        spot[last] = draw.choice([None, True, -1, 2**70, 0.5, "x", [], {}, [[]], {"$": "tuple"}])
        path.write_text(json.dumps(told))
        try:
            bring_back(path.parent, Net(), adam(Net()))
        except BadConfig:
            pass
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    np.random.set_state(before[2])
