"""Nested plain values and tensors, as JSON and a table of tensors, and back, exactly.

What JSON cannot tell apart is marked by a dict with the one key "$" naming what it is: tuples,
keys that are no strings, floats that are no numbers, tensors (which lie in the table under the
path that leads to them). Nothing that is read is run: marks name a fixed set of plain kinds.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.tensors import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MARK: Final = "$"
_DICTS: Final = (dict, OrderedDict, defaultdict)
_DTYPES: Final = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def pack(value: object, tensors: dict[str, torch.Tensor], root: str) -> object:
    """`value` for json.dumps; copies of its tensors go into `tensors`, by path from `root`.

    Raises BadConfig naming the place of anything that is no plain value.
    """
    return _Packer(tensors).pack(value, (root,))


class _Packer:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def pack(self, value: object, path: tuple[object, ...]) -> object:
        if value is None or isinstance(value, (bool, str, int, float, np.generic)):
            return self._scalar(value, path)
        if isinstance(value, torch.Tensor):
            return {MARK: "tensor", "name": self._put(copied(value, _place(path)), path)}
        if isinstance(value, np.ndarray):
            return {MARK: "ndarray", "name": self._put(_of_array(value, path), path)}
        if type(value) is list:
            return [self.pack(one, (*path, at)) for at, one in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            assert isinstance(value, tuple)
            return {
                MARK: "tuple",
                "items": [self.pack(one, (*path, at)) for at, one in enumerate(value)],
            }
        if type(value) is Counter:
            return {MARK: "counter", "items": self._items(value, path)}
        if isinstance(value, dict) and type(value) in _DICTS:
            if all(type(key) is str for key in value) and MARK not in value:
                return {key: self.pack(one, (*path, key)) for key, one in value.items()}
            return {MARK: "dict", "items": self._items(value, path)}
        if isinstance(value, (torch.dtype, torch.device)):
            return {MARK: type(value).__name__, "name": str(value)}
        raise BadConfig(f"{_place(path)} holds {_a(value)}, which no file can hold")

    def _scalar(self, value: Any, path: tuple[object, ...]) -> object:
        plain = value.item() if isinstance(value, np.generic) else value
        if plain is None or isinstance(plain, bool):
            return plain
        # Of a subclass, an enum say, only what it is underneath.
        if isinstance(plain, str):
            return str.__str__(plain)
        if isinstance(plain, int):
            return int.__int__(plain)
        if isinstance(plain, float):
            number = float(plain)
            return number if math.isfinite(number) else {MARK: "float", "name": repr(number)}
        raise BadConfig(f"{_place(path)} holds {_a(value)}, which no file can hold")

    def _items(self, value: dict[Any, Any], path: tuple[object, ...]) -> list[list[object]]:
        return [[self.pack(k, path), self.pack(v, (*path, k))] for k, v in value.items()]

    def _put(self, tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        name = base = "/".join(map(str, path))
        number = 1
        while name in self._tensors:  # the keys "a/b" and "a", then "b"
            number += 1
            name = f"{base}~{number}"
        self._tensors[name] = tensor
        return name


def unpack(value: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """What `pack` was given; `get` brings a tensor by its name.

    Raises BadConfig for marks it does not know and parts that are missing.
    """
    if isinstance(value, list):
        return [unpack(one, get) for one in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: unpack(one, get) for key, one in value.items()}
    try:
        return _unmark(value, get)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadConfig(
            f"a saved value marked {str(value[MARK])[:40]!r} is damaged: {error}"
        ) from None


def _unmark(value: dict[str, Any], get: Callable[[str], torch.Tensor]) -> Any:
    match value[MARK]:
        case "tensor":
            return get(value["name"])
        case "ndarray":
            return get(value["name"]).numpy()
        case "tuple":
            return tuple(unpack(one, get) for one in value["items"])
        case "dict":
            return {unpack(k, get): unpack(v, get) for k, v in value["items"]}
        case "counter":
            return Counter({unpack(k, get): unpack(v, get) for k, v in value["items"]})
        case "float":
            return float(value["name"])
        case "dtype":
            return _DTYPES[value["name"]]
        case "device":
            return torch.device(value["name"])
    raise ValueError("unknown")


def _of_array(value: np.ndarray, path: Sequence[object]) -> torch.Tensor:
    try:
        return torch.from_numpy(value.copy(order="C"))
    except (TypeError, ValueError):  # of objects, texts, dates, or of the other byte order
        raise BadConfig(
            f"{_place(path)} holds an array of {value.dtype}, which no file can hold"
        ) from None


def _place(path: Sequence[object]) -> str:
    """`optimizer state of 'exp_avg'`: what it belongs to, and the innermost name."""
    names = [key for key in path[1:] if isinstance(key, str)]
    return f"{path[0]} state of {names[-1]!r}" if names else f"{path[0]} state"


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in tuple("aeiou") else f"a {name}"
