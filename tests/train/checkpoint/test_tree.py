"""Plain values survive JSON exactly; anything else is named; no mark runs anything."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.tree import pack, unpack


def there_and_back(value):
    tensors = {}
    text = json.dumps(pack(value, tensors, "optimizer"), allow_nan=False)
    return unpack(json.loads(text), tensors.__getitem__)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal, with types, the sign of zero and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, n) for (k, v), (m, n) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b


@given(plain)
def test_plain_values_come_back_exactly(value):
    assert same(there_and_back(value), value)


def test_floats_that_are_no_numbers_come_back():
    assert there_and_back([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(there_and_back({"x": math.nan})["x"])


def test_a_dict_that_looks_like_a_mark_comes_back():
    for value in ({"$": "tensor", "name": "x"}, {"$": 1}, {"a": {"$": None}}):
        assert there_and_back(value) == value


def test_tensors_come_back_under_the_path_that_leads_to_them():
    tensors = {}
    state = {"state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(2.0)}}}
    packed = pack(state, tensors, "optimizer")
    assert set(tensors) == {"optimizer/state/0/exp_avg", "optimizer/state/0/step"}
    found = unpack(packed, tensors.__getitem__)
    assert torch.equal(found["state"][0]["exp_avg"], torch.arange(3.0))


def test_paths_that_read_alike_are_told_apart():
    found = there_and_back({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    assert (found["a/b"].item(), found["a"]["b"].item()) == (0, 1)


def test_numpys_values_become_pythons_and_its_arrays_come_back():
    value = {"f": np.float32(0.1), "i": np.int64(3), "b": np.bool_(True), "d": np.float64(0.3)}
    assert there_and_back(value) == {"f": float(np.float32(0.1)), "i": 3, "b": True, "d": 0.3}
    for array in (np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(2.5)):
        found = there_and_back(array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


class Color(enum.IntEnum):
    RED = 3


class Word(str):
    __slots__ = ()


def test_other_kinds_that_optimizers_and_schedulers_keep():
    assert there_and_back(Counter({30: 1, 80: 2})) == Counter({30: 1, 80: 2})
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}
    assert there_and_back(torch.Size([2, 3])) == (2, 3)
    assert there_and_back([torch.bfloat16, torch.device("cpu")]) == [
        torch.bfloat16,
        torch.device("cpu"),
    ]
    assert there_and_back([Color.RED, Word("x")]) == [3, "x"]
    assert there_and_back(random.Random(1).getstate()) == random.Random(1).getstate()


class Foo:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"state": {0: {"exp_avg": Foo()}}}, "optimizer state of 'exp_avg' holds a Foo"),
        (
            {"param_groups": [{"params": [0], "fn": math.sin}]},
            "optimizer state of 'fn' holds a bui",
        ),
        ([1, {2}], "optimizer state holds a set"),
        ({"x": b"bytes"}, "optimizer state of 'x' holds a bytes"),
        ({"x": 1j}, "optimizer state of 'x' holds a complex"),
        ({"x": np.array([object()])}, "optimizer state of 'x' holds an array of object"),
        ({"x": np.arange(3).astype(">i4")}, "optimizer state of 'x' holds an array of >i4"),
        ({"x": np.datetime64("2020-01-01")}, "optimizer state of 'x' holds a datetime64"),
        ({"x": {(Foo(),): 1}}, "optimizer state of 'x' holds a Foo"),
        ({"m": torch.eye(2).to_sparse()}, "optimizer state of 'm' holds a tensor of torch.sparse"),
    ],
)
def test_what_no_file_can_hold_is_named_with_its_place(value, text):
    with pytest.raises(BadConfig, match=text):
        pack(value, {}, "optimizer")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "pickle", "body": "x"},
        {"$": "tensor"},
        {"$": "tensor", "name": "missing"},
        {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "float", "name": "x"},
        {"$": "dtype", "name": "nn"},
        {"$": "device", "name": "os.system"},
        {"$": ["unhashable"]},
    ],
)
def test_marks_that_are_not_ours_are_refused(value):
    with pytest.raises(BadConfig, match="is damaged"):
        unpack(value, {}.__getitem__)
