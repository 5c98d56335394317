"""A function of the user between two windows leaves no trace in the training.

It runs on one rank only, whichever is the fastest by then. An evaluation's forward pass in train
mode, which moves the statistics of BatchNorm, would leave that rank with another consensus than
the others; a number drawn, as each DataLoader does, would make the rest of the run depend on who
was asked. What the function is for is not known here.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flodl_shm.train.modes import modes_kept
from flodl_shm.train.replica import write_into

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever happens inside, model and generators are afterwards as they were.

    Costs a copy of the model's tensors in the host's memory as long as it lasts.
    """
    with _all_but_values_kept(model, device):
        before = _Snapshot(model)
        try:
            yield
        finally:
            before.put_back()


@contextmanager
def kept(model: nn.Module | None) -> Iterator[None]:
    """The same but for the values of the model, which are the function's to answer for."""
    first = None if model is None else next(model.parameters(), None)
    with _all_but_values_kept(model, torch.device("cpu") if first is None else first.device):
        yield


@contextmanager
def _all_but_values_kept(model: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Modes of modules and of autograd, gradients, generators."""
    is_grad_enabled = torch.is_grad_enabled()
    try:
        with _generators_kept(device):
            if model is None:
                yield
            else:
                with modes_kept(model), _gradients_kept(model):
                    yield
    finally:
        torch.set_grad_enabled(is_grad_enabled)


class _Snapshot:
    """Which modules, parameters and buffers there are, where they live, and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (table, dict(table)) for module in model.modules() for table in _tables(module)
        ]
        held = {id(one): one for _, before in self._tables for one in before.values()}
        self._tensors = [
            (tensor, tensor.data, tensor.requires_grad, tensor.detach().to("cpu", copy=True))
            for tensor in held.values()
            if isinstance(tensor, torch.Tensor) and _has_values(tensor)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo all: what was re-bound, and what was written in place."""
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for tensor, memory, requires_grad, value in self._tensors:
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                tensor.data = memory
            write_into(memory, value)
            tensor.requires_grad_(requires_grad)


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps what it is made of, by name."""
    return module._parameters, module._buffers, module._modules


def _has_values(tensor: torch.Tensor) -> bool:
    """A dense one, and no promise of one."""
    is_promise = nn.parameter.is_lazy(tensor) or tensor.is_meta
    return tensor.layout == torch.strided and not is_promise


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Whether each parameter has one: a backward pass inside must not add to the next step's."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, grad in before:
            if parameter.grad is not grad:
                parameter.grad = grad if grad is not None and _fits(parameter, grad) else None


def _fits(parameter: nn.Parameter, grad: torch.Tensor) -> bool:
    """A function that has changed a parameter's kind must not fail in its tidying up."""
    return (grad.shape, grad.dtype, grad.device) == (
        parameter.shape,
        parameter.dtype,
        parameter.device,
    )


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Those that train/seeds.py seeds."""
    on_cuda = device.type == "cuda"
    host, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    theirs = torch.cuda.get_rng_state(device) if on_cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        np.random.set_state(numpys)
        random.setstate(pythons)
        if theirs is not None:
            torch.cuda.set_rng_state(theirs, device)
