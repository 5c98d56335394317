"""Brings a rank back to where a checkpoint stands: model, optimizer, random numbers, scheduler.

Strict: names, shapes and dtypes must be those that were saved, and the first difference is named.
Values are copied in place, since parameters are views of shared memory. It trusts that the
launcher has verified the files, and runs nothing of what is in them whatever they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint import rng
from flodl_shm.train.checkpoint.durable import why
from flodl_shm.train.checkpoint.names import MODEL, optimizer_json, optimizer_tensors
from flodl_shm.train.checkpoint.snapshot import SCHEMA, extra, groups, local, once
from flodl_shm.train.checkpoint.tensors import TensorFile, fact_of
from flodl_shm.train.checkpoint.tree import unpack
from flodl_shm.train.replica import write_into

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from flodl_shm.ids import Rank

HINT = "Resume with the script that wrote it, or begin a training of its own with another --save."


@dataclass(frozen=True, slots=True)
class Restored:
    """What came back besides model and optimizer."""

    rng: bool  # the random generators go on where they stood; else they want a fresh seed
    scheduler: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()  # what could not be restored, in words


def restore(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    rank: Rank,
    state_of: Rank | None,
    device: torch.device | str,
) -> Restored:
    """Load the consensus, and the own state of rank `state_of` (None: of nobody).

    Random states only where `state_of` is this very rank: two ranks must not draw the same.
    Raises BadConfig naming the first difference; nothing is changed then, but for a damaged file.
    """
    notes: list[str] = []
    saved = None
    if state_of is not None:
        saved = _read_own(folder, state_of)
        if saved is None:
            name = optimizer_json(state_of)
            notes.append(f"there is no {name} in {folder}: the optimizer of rank {rank} is fresh")
    with TensorFile(folder / MODEL) as file:
        pairs = _match_model(file, model, folder)
        if saved is not None:
            _check_optimizer(saved, optimizer, model, folder)
        with torch.no_grad():
            for tensor, name in pairs:
                write_into(tensor, file.get(name))
    if saved is None:
        return Restored(rng=False, notes=tuple(notes))
    _load_optimizer(optimizer, saved["optimizer"], folder)
    notes += _load_local(model, saved)
    has_rng = state_of == rank and _put_back(saved, torch.device(device), folder)
    if state_of == rank and not has_rng:
        notes.append(f"{folder} has no random state of a {torch.device(device).type} device")
    return Restored(rng=has_rng, scheduler=saved["scheduler"], notes=tuple(notes))


def borrow(folder: Path, *, model: nn.Module, optimizer: Optimizer, lender: Rank) -> Restored:
    """Load the own state of another rank that is training: all but what it draws at random.

    Raises BadConfig naming the first difference; nothing is changed then, but for a damaged file.
    """
    saved = _read_own(folder, lender)
    if saved is None:
        raise BadConfig(f"there is no {optimizer_json(lender)} in {folder}")
    _check_optimizer(saved, optimizer, model, folder)
    _load_optimizer(optimizer, saved["optimizer"], folder)
    notes = _load_local(model, saved)
    return Restored(rng=False, scheduler=saved["scheduler"], notes=tuple(notes))


def _match_model(file: TensorFile, model: nn.Module, folder: Path) -> list[tuple[Tensor, str]]:
    """(tensor of the model, its name in the file) for each; raises BadConfig on a difference."""
    tensors, ties = once(model)
    aliases = file.aliases()
    for name in sorted(file.names.union(aliases) ^ tensors.keys() ^ ties.keys()):
        where = "the model has none" if name not in tensors | ties else "it is not in it"
        raise BadConfig(f"{folder} does not fit: of {name!r} {where}", hint=HINT)
    for name, first in ties.items():
        if aliases.get(name, name) != aliases.get(first, first):
            raise BadConfig(
                f"{folder} does not fit: {name!r} and {first!r} are one tensor in the model and"
                " two in it",
                hint=HINT,
            )
    pairs = []
    for name, tensor in tensors.items():
        there = aliases.get(name, name)
        mine, theirs = fact_of(tensor), file.fact(there)
        if mine != theirs:
            raise BadConfig(
                f"{folder} does not fit: {name!r} is {mine} in the model and {theirs} in it",
                hint=HINT,
            )
        pairs.append((tensor, there))
    return pairs


def _read_own(folder: Path, rank: Rank) -> dict[str, Any] | None:
    """A rank's saved own state; None when it is not there. Raises BadConfig when damaged."""
    path = folder / optimizer_json(rank)
    tensors = folder / optimizer_tensors(rank)
    if not path.is_file() or not tensors.is_file():
        return None
    try:
        told = json.loads(path.read_bytes())
        schema = told["schema"]
        if schema > SCHEMA:
            raise BadConfig(f"{path} is of schema {schema}, this flodl_shm reads up to {SCHEMA}")
        with TensorFile(tensors) as file:
            found = {key: unpack(value, file.get) for key, value in told.items()}
    except OSError as error:
        raise BadConfig(f"cannot read {why(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadConfig(f"{path} cannot be read: {why(error)}") from None
    odd = _first_odd(found)
    if odd:
        raise BadConfig(f"{path} cannot be read: what it says of {odd} is damaged")
    return found


def _first_odd(found: dict[str, Any]) -> str:
    """The first part that is not of its kind; empty when all are."""
    state: Any = found.get("optimizer")
    is_state = isinstance(state, dict) and isinstance(state.get("state"), dict)
    fine = {
        "class": isinstance(found.get("class"), str),
        "groups": _is_groups(found.get("groups")),
        "optimizer": is_state and isinstance(state.get("param_groups"), list),
        "rng": isinstance(found.get("rng"), dict),
        "scheduler": isinstance(found.get("scheduler", 0), (dict, type(None))),
        "local": _is_tensors(found.get("local", {})),
        "extra": isinstance(found.get("extra", {}), dict),
    }
    return next((part for part, is_fine in fine.items() if not is_fine), "")


def _is_groups(value: object) -> bool:
    try:
        msgspec.convert(value, list[list[tuple[str, list[int]]]])
    except msgspec.ValidationError:
        return False
    return True


def _is_tensors(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(t, torch.Tensor) for t in value.values())


def _check_optimizer(
    saved: dict[str, Any], optimizer: Optimizer, model: nn.Module, folder: Path
) -> None:
    mine, theirs = type(optimizer).__qualname__, saved["class"]
    if mine != theirs:
        raise BadConfig(f"the optimizer is {mine}, the one in {folder} was {theirs}", hint=HINT)
    names = {id(p): name for name, p in model.named_parameters()}
    here, there = groups(optimizer, names), saved["groups"]
    if len(here) != len(there):
        raise BadConfig(
            f"the optimizer has {len(here)} parameter groups, the one in {folder} had {len(there)}",
            hint=HINT,
        )
    for at, (group, was) in enumerate(zip(here, there, strict=True)):
        if len(group) != len(was):
            raise BadConfig(
                f"group {at} of the optimizer has {len(group)} parameters, in {folder} it had"
                f" {len(was)}",
                hint=HINT,
            )
        for (name, shape), (old_name, old_shape) in zip(group, was, strict=True):
            is_other = bool(name and old_name) and name != old_name
            if is_other or shape != old_shape:
                raise BadConfig(
                    f"group {at} of the optimizer has {name!r} {shape} where in {folder} it had"
                    f" {old_name!r} {old_shape}",
                    hint=HINT,
                )


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], folder: Path) -> None:
    try:
        optimizer.load_state_dict(state)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise BadConfig(
            f"{type(optimizer).__name__} refuses its state in {folder}: {why(error)}", hint=HINT
        ) from None
    # load_state_dict casts to the parameter's dtype: a float32 moment of a bfloat16 parameter
    # would lose its lower half.
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(every):
        if isinstance(state["state"].get(index), dict):
            _undo_casts(optimizer.state[p], state["state"][index])


def _undo_casts(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        now = mine.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            mine[key] = now if now.dtype == value.dtype else value.to(now.device)


def _load_local(model: nn.Module, saved: dict[str, Any]) -> list[str]:
    """Integer buffers and extra states of modules; what does not fit is said and left."""
    notes = []
    mine = local(model)
    for name, value in saved.get("local", {}).items():
        tensor = mine.get(name)
        if tensor is not None and fact_of(tensor) == fact_of(value):
            with torch.no_grad():
                write_into(tensor, value)
    told = saved.get("extra", {})
    for prefix in extra(model):
        if prefix in told:
            model.get_submodule(prefix).set_extra_state(told[prefix])
        else:
            notes.append(f"the checkpoint has no extra state of {prefix or 'the model'}")
    return notes


def _put_back(saved: dict[str, Any], device: torch.device, folder: Path) -> bool:
    try:
        return rng.put_back(saved["rng"], device)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise BadConfig(f"the random state in {folder} is damaged: {why(error)}") from None
