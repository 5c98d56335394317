"""Tensors as a safetensors file, hashed while they are written, and back.

The file is what `safetensors.torch.load_file` opens: 8 bytes of header length, a JSON header, then
the tensors without gaps, larger dtypes first. Complex tensors, which not every reader knows, are
pairs of reals, with their dtypes under "complex" in the metadata. Reading runs nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import why, write_durably

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from flodl_shm.control.checkpoint_meta import SavedFile

_NAMES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_CODES: Final = {getattr(torch, n): code for n, code in _NAMES.items() if hasattr(torch, n)}
_OF_CODE: Final = {code: name for name, code in _NAMES.items()}
_COMPLEX: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.complex32, torch.complex64, torch.complex128)
}
_ALIGNMENT: Final = 8


def copied(tensor: Tensor, place: str) -> Tensor:
    """A private copy on the CPU, dense and contiguous, without a graph.

    Raises BadConfig naming `place` for a tensor that no file can hold.
    """
    trouble = ""
    if nn.parameter.is_lazy(tensor):
        trouble = "a tensor without a shape"
    elif tensor.is_meta:
        trouble = "a tensor on the meta device"
    elif tensor.layout != torch.strided:
        trouble = f"a tensor of {tensor.layout}"
    elif tensor.dtype not in _CODES and not tensor.is_complex():
        trouble = f"a tensor of {tensor.dtype}"
    elif type(tensor.detach()) is not Tensor:
        trouble = f"a {type(tensor).__name__}"
    if trouble:
        raise BadConfig(f"{place} holds {trouble}, which no file can hold")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_tensors(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> SavedFile:
    """Write contiguous CPU tensors, as `copied` makes them. Raises OSError with the path."""
    reals = {key: torch.view_as_real(t) if t.is_complex() else t for key, t in tensors.items()}
    complexes = {
        key: str(t.dtype).removeprefix("torch.") for key, t in tensors.items() if t.is_complex()
    }
    told = dict(metadata) | ({"complex": json.dumps(complexes)} if complexes else {})
    # Larger items first: each tensor is aligned to its own size then.
    order = sorted(reals, key=lambda key: (-reals[key].element_size(), key))
    header: dict[str, object] = {"__metadata__": told}
    end = 0
    for key in order:
        begin, end = end, end + reals[key].numel() * reals[key].element_size()
        header[key] = {
            "dtype": _CODES[reals[key].dtype],
            "shape": list(reals[key].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return write_durably(folder, name, _pieces(text, [reals[key] for key in order]))


def _pieces(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file open for reading, a context manager.

    Tensors come as private copies on the CPU. Raises BadConfig when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, "pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self._names = frozenset(self._file.keys())
            self._complex = _strings(self.metadata.get("complex", "{}"))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise BadConfig(f"cannot read {path}: {why(error)}") from None

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors in it."""
        return self._names

    def aliases(self) -> dict[str, str]:
        """Names of tied tensors, to the name under which the value is. Raises BadConfig."""
        try:
            return _strings(self.metadata.get("aliases", "{}"))
        except (ValueError, RecursionError) as error:
            raise BadConfig(f"cannot read {self._path}: {error}") from None

    def fact(self, name: str) -> str:
        """`3x4 float32`: shape and dtype of one tensor, its values unread. Raises BadConfig."""
        try:
            piece = self._file.get_slice(name)
            shape, code = list(piece.get_shape()), str(piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise BadConfig(f"cannot read {name!r} in {self._path}: {why(error)}") from None
        if name in self._complex:
            return in_words(shape[:-1], self._complex[name])
        return in_words(shape, _OF_CODE.get(code, code))

    def get(self, name: str) -> Tensor:
        """One tensor. Raises BadConfig when it is not there or damaged."""
        try:
            # The file's pages are only mapped: what is kept must not depend on the disk.
            tensor = self._file.get_tensor(name).clone()
            if name not in self._complex:
                return tensor
            return torch.view_as_complex(tensor).to(_COMPLEX[self._complex[name]])
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            raise BadConfig(f"cannot read {name!r} in {self._path}: {why(error)}") from None


def fact_of(tensor: Tensor) -> str:
    """`3x4 float32`: shape and dtype, as TensorFile.fact has them."""
    return in_words(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def in_words(shape: list[int], dtype: str) -> str:
    """`3x4 float32`."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def _strings(text: str) -> dict[str, str]:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"{text[:80]!r} is no table of names")
    return found
