"""A user's module and its slot: which tensors the reduce sees, and how they get there.

A contiguous float32 tensor on the CPU lives in the slot: its `data` is a view of it, so arriving
and leaving cost nothing. Every other floating tensor (half and double precision, odd strides,
another device) is converted on the way in and out, element by logical element. Integer and bool
buffers and buffers left out of the state dict stay the rank's own, and so do those that begin with
NaN or infinity (a mask of -inf, an observer's first minimum): they have no mean. It knows nothing
of rounds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.train.finite import fault, is_finite
from flodl_shm.wire.layout import Layout, TensorFact, plan_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flodl_shm.wire.layout import Entry, Kind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps a tensor: `table` is its `_parameters` or `_buffers`."""

    table: dict[str, torch.Tensor | None]
    key: str
    name: str  # as in the state dict

    def tensor(self) -> torch.Tensor:
        """What lies there now. Raises BadConfig when the user took it away."""
        found = self.table.get(self.key)
        if found is None:
            raise BadConfig(
                f"{self.name} was there when the run began and is gone",
                hint="Freeze a parameter with requires_grad_(False) instead of removing it.",
            )
        return found


class BoundTensor:
    """One entry of the layout: the places that share it, and its piece of the slot."""

    def __init__(self, entry: Entry, places: list[Place]) -> None:
        self.entry = entry
        self.places = places
        self.home = torch.empty(0, device="cpu")  # the piece of the slot, in the entry's shape
        self.address = 0  # of an in-slot tensor; -1: the tensor is copied in and out

    def settle(self, slot: torch.Tensor, *, inside: bool) -> None:
        """Copy the value in and, if it may and can live `inside`, make the slot its memory."""
        entry = self.entry
        self.home = slot[entry.offset : entry.offset + entry.numel].view(entry.shape)
        self._take(self.places[0].tensor(), inside=inside)

    def come_in(self) -> None:
        """Bring what the user re-bound or keeps elsewhere into the slot."""
        address = self.address
        for place in self.places:
            tensor = place.tensor()
            if tensor.data_ptr() != address or not tensor.is_contiguous():
                self._take(tensor, inside=address >= 0)
                return

    def _take(self, tensor: torch.Tensor, *, inside: bool) -> None:
        if tensor.shape != self.entry.shape:
            raise BadConfig(
                f"{self.entry.name} had shape {self.entry.shape} when the run began and has "
                f"{tuple(tensor.shape)} now",
                hint="A tensor may be re-bound, but not to another shape.",
            )
        # Re-bound within the arena (a transpose, another tensor's piece): it must not be read
        # while it is being overwritten.
        near = _storage(tensor) == _storage(self.home)
        self.home.copy_(tensor.clone() if near else tensor)
        if not inside or not all(_fits(place.tensor()) for place in self.places):
            self.address = -1
            return
        for place in self.places:
            place.tensor().data = self.home
        self.address = self.home.data_ptr()

    @property
    def seen(self) -> torch.Tensor:
        """What enters the mean, where a look at it is cheapest: on a device, on that device.

        Double precision has numbers that the slot has not.
        """
        tensor = self.places[0].tensor()
        there = tensor.device.type != "cpu" and tensor.dtype != torch.float64
        return tensor if there or not self.home.numel() else self.home

    def go_out(self) -> None:
        """Write the slot's value to tensors that live elsewhere."""
        if self.address < 0:
            for tensor in _distinct(self.places):
                write_into(tensor, self.home)


class _Shape:
    """Which modules a model is made of, and how many parameters each has.

    Comparing costs 0.1 to 0.2 us per module: little beside the look at each tensor of an arrival.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._sizes = [
            (m._modules, len(m._modules), m._parameters, len(m._parameters)) for m in modules
        ]
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._empty = [
            (m._parameters, key) for m in modules for key, p in m._parameters.items() if p is None
        ]

    def is_as_it_was(self) -> bool:
        """False if a module or a parameter was added, removed, or put in another's place."""
        for children, many, parameters, count in self._sizes:
            if len(children) != many or len(parameters) != count:
                return False
        for children, had in self._children:
            if list(children.values()) != had:
                return False
        return all(parameters.get(key) is None for parameters, key in self._empty)


class Replica:
    """One model and one slot. `layout` defaults to the plan over the model's own facts.

    Raises BadConfig for tensors that cannot be averaged, WeBroke for another model's layout.
    """

    def __init__(self, model: nn.Module, layout: Layout | None = None) -> None:
        found = _gather(model)
        self.layout = plan_layout([fact for fact, _ in found]) if layout is None else layout
        if [fact.name for fact, _ in found] != [entry.name for entry in self.layout.entries]:
            raise WeBroke("the layout is not this model's")
        self._tensors = [
            BoundTensor(entry, places)
            for entry, (_, places) in zip(self.layout.entries, found, strict=True)
        ]
        self._model = model
        self._shape = _Shape(model)
        self._arena = 0  # address of the storage the slot lies in; 0: not bound
        self._whole: torch.Tensor | None = None  # the slot, if all tensors are on the CPU

    @staticmethod
    def facts(model: nn.Module) -> list[TensorFact]:
        """Every averaged tensor once: parameters (tied ones once), then persistent float buffers.

        Raises BadConfig naming a tensor that has no dense floating values on a device.
        """
        return [fact for fact, _ in _gather(model)]

    @torch.no_grad()
    def bind(self, slot: torch.Tensor) -> None:
        """Copy the model's values into the slot (1-D float32) and let what fits live there.

        Raises WeBroke for a slot too short.
        """
        if slot.numel() < self.layout.grid.floats:
            raise WeBroke(f"a slot of {slot.numel()} floats, {self.layout.grid.floats} needed")
        outside = _overlapping([bound.places[0].tensor() for bound in self._tensors])
        for index, bound in enumerate(self._tensors):
            bound.settle(slot, inside=index not in outside)
        self._arena = _storage(slot)
        if all(bound.places[0].tensor().device.type == "cpu" for bound in self._tensors):
            self._whole = slot[: self.layout.grid.floats]

    @torch.no_grad()
    def arrive(self) -> None:
        """Make the slot hold the replica, before this rank publishes its arrival.

        Raises BadConfig if the user removed a tensor, added a parameter, or changed a shape. Does
        nothing while there is no slot, as in a rank that trains alone.
        """
        if self._arena:
            if not self._shape.is_as_it_was():
                self._refuse_new_parameters()
                self._shape = _Shape(self._model)  # one without weight has come or gone
            for bound in self._tensors:
                bound.come_in()

    def _refuse_new_parameters(self) -> None:
        """Nobody would ever average them, and ranks would differ without a word."""
        held = [place for bound in self._tensors for place in bound.places]
        known = {id(place.tensor()) for place in held}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise BadConfig(
                    f"parameter {name} was not there when the run began",
                    hint="Add all parameters before the training; freeze those not needed yet.",
                )

    def broken(self) -> str:
        """The first tensor that is not finite and what it is, in words; empty if there is none.

        Call after `arrive`.
        """
        whole = self._whole  # in one pass; between the tensors anything may lie
        if is_finite([whole] if whole is not None else [bound.seen for bound in self._tensors]):
            return ""
        for bound in self._tensors:
            if not is_finite([bound.seen]):
                kind = "parameter" if bound.entry.kind == "param" else "buffer"
                return f"{kind} {bound.entry.name} is {fault(bound.seen)}"
        return ""

    @torch.no_grad()
    def leave(self) -> None:
        """Hand the consensus in the slot to the tensors that live outside it."""
        if self._arena:
            for bound in self._tensors:
                bound.go_out()

    @torch.no_grad()
    def release(self) -> None:
        """Give all that lies in the arena private memory: same tensor objects, same values.

        Afterwards nothing the model holds is in the arena, local buffers included.
        """
        private: dict[object, torch.Tensor] = {}
        for tensor in _all_tensors(self._model) if self._arena else ():
            if _storage(tensor) == self._arena:
                key = _identity(tensor)
                if key not in private:
                    private[key] = tensor.detach().clone()
                tensor.data = private[key]
        for bound in self._tensors:
            bound.home = torch.empty(0, device="cpu")
        self._arena, self._whole = 0, None

    @torch.no_grad()
    def state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of all averaged tensors, by name, in the layout's order."""
        return {
            bound.entry.name: _plain(bound.places[0].tensor()).clone() for bound in self._tensors
        }

    @torch.no_grad()
    def sha256(self) -> str:
        """Hex digest over names and values, in the layout's order and the tensors' own dtypes."""
        digest = hashlib.sha256()
        for bound in self._tensors:
            digest.update(repr(bound.entry.name).encode())
            flat = _plain(bound.places[0].tensor()).reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def write_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy by logical element, whatever the strides; an element met twice gets the first value.

    torch refuses to write a tensor that overlaps itself (an expanded buffer, say), and which of
    two values wins there must not differ between ranks.
    """
    if not _overlaps_itself(tensor):
        tensor.copy_(value)
        return
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset())
    cells = (
        torch.arange(span, device="cpu")
        .as_strided(tensor.shape, tensor.stride())
        .reshape(-1)
        .numpy()
    )
    once, first = np.unique(cells, return_index=True)
    chosen = value.reshape(-1)[torch.from_numpy(first)].to(tensor.device, tensor.dtype)
    storage[torch.from_numpy(once).to(tensor.device)] = chosen


def _gather(model: nn.Module) -> list[tuple[TensorFact, list[Place]]]:
    """Facts and places of every averaged tensor, one per distinct piece of memory."""
    found: dict[object, tuple[TensorFact, list[Place]]] = {}
    kinds: tuple[Kind, ...] = ("param", "buffer")
    for kind in kinds:
        for place in _places(model, kind):
            tensor = place.tensor()
            key = _identity(tensor)
            if key in found:
                found[key][1].append(place)
            else:
                found[key] = (_fact(place.name, tensor, kind), [place])
    return list(found.values())


def _places(model: nn.Module, kind: Kind) -> Iterator[Place]:
    for prefix, module in model.named_modules():
        table = module._parameters if kind == "param" else module._buffers
        for key, tensor in table.items():
            name = f"{prefix}.{key}".lstrip(".")
            if tensor is None or (kind == "buffer" and key in module._non_persistent_buffers_set):
                continue
            if _is_averaged(tensor, name) and (kind == "param" or is_finite([tensor])):
                yield Place(table, key, name)


def _is_averaged(tensor: torch.Tensor, name: str) -> bool:
    """Whether a mean of it makes sense; raises BadConfig where one would, but cannot be had."""
    trouble = ""
    if nn.parameter.is_lazy(tensor):
        trouble = "has no shape yet; run one batch through the model first"
    elif tensor.is_complex():
        trouble = "is complex; keep its real and imaginary parts as float tensors"
    elif not tensor.is_floating_point():
        return False
    elif tensor.layout != torch.strided:
        trouble = f"is {tensor.layout}; only dense tensors can be averaged"
    elif tensor.is_meta:
        trouble = "is on the meta device and has no values"
    if trouble:
        raise BadConfig(f"{name} {trouble}")
    return True


def _fact(name: str, tensor: torch.Tensor, kind: Kind) -> TensorFact:
    return TensorFact(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind)


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the very same memory; empty ones are only themselves."""
    if not tensor.numel():
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _fits(tensor: torch.Tensor) -> bool:
    """Whether a tensor can live in the slot."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not _overlaps_itself(tensor)
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one float: never missed, and suspected only of odd strides."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        return True
    ordered = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in ordered:
        if stride <= reach:  # treating it as if it did overlap is safe, only slower
            return True
        reach += stride * (size - 1)
    return False


def _overlapping(tensors: list[torch.Tensor]) -> set[int]:
    """Indices of tensors that share some but not all memory with another one: kept outside."""
    spans = []
    for index, t in enumerate(tensors):
        if t.numel():
            reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            low = t.data_ptr()
            spans.append((str(t.device), low, low + (reach + 1) * t.element_size(), index))
    shared: set[int] = set()
    last: tuple[str, int, int, int] | None = None
    for span in sorted(spans):
        if last is not None and span[0] == last[0] and span[1] < last[2]:
            shared |= {span[3], last[3]}
        if last is None or span[0] != last[0] or span[2] > last[2]:
            last = span
    return shared


def _all_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            dense = (t for t in table.values() if t is not None and not nn.parameter.is_lazy(t))
            yield from (tensor for tensor in dense if tensor.layout == torch.strided)


def _storage(tensor: torch.Tensor) -> int:
    """Address of the memory the tensor is a piece of."""
    return tensor.untyped_storage().data_ptr()


def _distinct(places: list[Place]) -> list[torch.Tensor]:
    return list({id(t): t for t in (place.tensor() for place in places)}.values())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()
