"""Tensor files: every dtype comes back bit for bit, and safetensors itself agrees on the bytes."""

from __future__ import annotations

import hashlib
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.manifest import check_header
from flodl_shm.train.checkpoint.tensors import TensorFile, copied, fact_of, write_tensors

REAL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]


def random_bits(dtype, *shape):
    """Any bits: NaNs with payloads, infinities and denormals included."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.empty(shape, dtype=dtype).numel()
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor):
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def examples():
    torch.manual_seed(0)
    found = {}
    for dtype in REAL + COMPLEX:
        name = str(dtype).removeprefix("torch.")
        found[name] = random_bits(dtype, 3, 5)
        found[f"{name}.scalar"] = random_bits(dtype, 1)[0]
        found[f"{name}.empty"] = torch.empty(0, 4, dtype=dtype)
    found["transposed"] = torch.randn(4, 6).t()
    found["strided"] = torch.randn(20)[::3]
    found["expanded"] = torch.randn(1, 3).expand(5, 3)
    found["conjugate"] = torch.randn(3, dtype=torch.complex64).conj()
    found["negative"] = torch.randn(3, dtype=torch.complex64).conj().imag
    found["grown"] = torch.randn(3, requires_grad=True) * 2
    found["channels last"] = torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)
    found['name/with . \u00e9 "quotes"'] = torch.ones(1)
    return found


def test_everything_comes_back_bit_for_bit(tmp_path):
    given = examples()
    copies = {name: copied(tensor, name) for name, tensor in given.items()}
    told = write_tensors(tmp_path, "x.safetensors", copies, {"format": "pt"})
    body = (tmp_path / "x.safetensors").read_bytes()
    assert (told.bytes, told.sha256) == (len(body), hashlib.sha256(body).hexdigest())
    check_header(tmp_path / "x.safetensors", told.bytes)
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert file.names == given.keys()
        for name, tensor in given.items():
            found = file.get(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bits(found) == bits(tensor.detach().resolve_conj().resolve_neg()), name
            assert file.fact(name) == fact_of(tensor)


def test_safetensors_reads_it_and_would_have_written_the_same_bytes(tmp_path):
    torch.manual_seed(1)
    given = {
        "b": torch.randn(3, dtype=torch.bfloat16),
        "a": torch.randn(2, 2),
        "c": torch.randn(()),
        "z": torch.tensor(7),
        "m": torch.tensor([True, False]),
    }
    write_tensors(tmp_path, "ours", given, {"format": "pt"})
    save_file(given, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, tensor in load_file(tmp_path / "ours").items():
        assert torch.equal(tensor, given[name])


def test_no_tensors_at_all_is_a_file_too(tmp_path):
    told = write_tensors(tmp_path, "x", {}, {})
    check_header(tmp_path / "x", told.bytes)
    assert load_file(tmp_path / "x") == {}


def test_complex_ones_are_pairs_of_reals_for_other_readers(tmp_path):
    value = torch.randn(2, dtype=torch.complex128)
    write_tensors(tmp_path, "x", {"w": value}, {})
    with safe_open(tmp_path / "x", "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.view_as_real(value))
        assert file.metadata() == {"complex": '{"w": "complex128"}'}


def test_half_precision_complex_comes_back(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental"
        value = torch.view_as_complex(torch.randn(3, 2, dtype=torch.float16))
        write_tensors(tmp_path, "x", {"w": copied(value, "w")}, {})
        with TensorFile(tmp_path / "x") as file:
            found = file.get("w")
        assert found.dtype == torch.complex32
        assert torch.equal(torch.view_as_real(found), torch.view_as_real(value))


def test_a_copy_shares_nothing_with_the_original():
    given = torch.zeros(3, requires_grad=True)
    found = copied(given, "x")
    assert found.data_ptr() != given.data_ptr()
    assert not found.requires_grad


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), "a tensor of torch.sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "a tensor on the meta device"),
        (lambda: nn.UninitializedParameter(), "a tensor without a shape"),
        (lambda: torch.ones(2).as_subclass(Odd), "a Odd"),
        (lambda: torch.empty(2, dtype=torch.float8_e4m3fnuz), "a tensor of torch.float8_e4m3fnuz"),
    ],
)
def test_what_no_file_can_hold_is_named(make, text):
    with pytest.raises(BadConfig, match=f"'p' holds {text}, which no file can hold"):
        copied(make(), "'p'")


@pytest.mark.parametrize("body", [b"", b"x", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, body):
    (tmp_path / "x").write_bytes(body)
    with pytest.raises(BadConfig, match=r"cannot read .*x: "):
        TensorFile(tmp_path / "x")
    with pytest.raises(BadConfig, match=r"cannot read .*y"):
        TensorFile(tmp_path / "y")


def test_damaged_metadata_and_missing_names_are_refused(tmp_path):
    write_tensors(tmp_path, "x", {"w": torch.ones(2)}, {"aliases": "[1]"})
    with TensorFile(tmp_path / "x") as file:
        with pytest.raises(BadConfig, match="no table of names"):
            file.aliases()
        with pytest.raises(BadConfig, match="cannot read 'v'"):
            file.get("v")
    write_tensors(tmp_path, "y", {"w": torch.ones(2)}, {"complex": '{"w": "complex999"}'})
    with TensorFile(tmp_path / "y") as file, pytest.raises(BadConfig, match="cannot read 'w'"):
        file.get("w")
    write_tensors(tmp_path, "z", {}, {"complex": "{"})
    with pytest.raises(BadConfig, match=r"cannot read .*z"):
        TensorFile(tmp_path / "z")
