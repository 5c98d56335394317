"""What a rank puts into a checkpoint, copied while the training stands still for a moment.

The consensus (all persistent tensors of the model, tied ones once) if it is this rank's to write;
and what is the rank's own: optimizer, random states, scheduler, the tensors that are no average
(integer buffers) and the modules' extra state. Copies only: nothing is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint import rng
from flodl_shm.train.checkpoint.tensors import copied
from flodl_shm.train.checkpoint.tree import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

SCHEMA: Final = 1  # of optimizer-rankN.json


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """Tensors by name, on the CPU; tied names to the one under which the value is."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A rank's own state: plain values for JSON, and the tensors they refer to."""

    plain: dict[str, object]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def copy_model(model: nn.Module) -> ModelCopy:
    """Copy every persistent tensor once. Raises BadConfig for one that no file can hold."""
    tensors, aliases = once(model)
    return ModelCopy(
        {name: copied(t, f"the model's {name!r}") for name, t in tensors.items()}, aliases
    )


@torch.no_grad()
def copy_own(
    model: nn.Module | None, optimizer: Optimizer, scheduler: dict[str, Any] | None
) -> OwnCopy:
    """Copy what is this rank's alone. Raises BadConfig naming what no file can hold."""
    tensors: dict[str, Tensor] = {}
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    plain: dict[str, object] = {
        "schema": SCHEMA,
        "class": type(optimizer).__qualname__,
        "groups": groups(optimizer, names),
        "optimizer": pack(optimizer.state_dict(), tensors, "optimizer"),
        "rng": pack(rng.states(device_of(optimizer)), tensors, "random"),
        "scheduler": pack(scheduler, tensors, "scheduler"),
    }
    if model is not None:
        plain["local"] = pack(local(model), tensors, "local")
        plain["extra"] = pack(extra(model), tensors, "extra")
    return OwnCopy(plain, tensors)


def groups(optimizer: Optimizer, names: dict[int, str]) -> list[list[list[object]]]:
    """Per parameter group [name or "", shape] of each parameter, in order."""
    return [
        [[names.get(id(p), ""), list(p.shape)] for p in group["params"]]
        for group in optimizer.param_groups
    ]


def device_of(optimizer: Optimizer) -> torch.device:
    """Where the first parameter lies."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    first = next(every, None)
    return torch.device("cpu") if first is None else first.device


def persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name they have in a state_dict, parameters first."""
    for kind in ("_parameters", "_buffers"):
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in getattr(module, kind).items():
                is_left_out = kind == "_buffers" and key in module._non_persistent_buffers_set
                if tensor is not None and not is_left_out:
                    yield f"{prefix}.{key}".lstrip("."), tensor


def once(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each distinct piece of memory by its first name, and the other names to the first.

    Raises BadConfig for a lazy tensor.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in persistent(model):
        if nn.parameter.is_lazy(tensor):
            raise BadConfig(f"the model's {name!r} has no shape yet")
        key = _identity(tensor)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor
    return tensors, aliases


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the very same memory; empty ones are only themselves."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def local(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers that are never averaged: counters and masks of this rank."""
    return {
        name: tensor
        for name, tensor in once(model)[0].items()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }


def extra(model: nn.Module) -> dict[str, Any]:
    """What modules add to their state_dict by get_extra_state, by module."""
    return {
        prefix: module.get_extra_state()
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
