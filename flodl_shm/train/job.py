"""What the user wants trained: the arguments of a Trainer, checked, in one value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from flodl_shm.control.options import Wishes
from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.train.epoch_handle import EpochHandle


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker needs to know that is the same on every rank."""

    model: nn.Module | Callable[..., nn.Module]
    optimizer: Optimizer | Callable[..., Optimizer]
    train_step: Callable[[nn.Module, Any], torch.Tensor]
    dataset: Any
    eval_fn: Callable[[nn.Module, Any], float] | None = None
    eval_dataset: Any = None
    epoch_fn: Callable[[int, EpochHandle], object] | None = None
    checkpoint_fn: Callable[[int, nn.Module], object] | None = None
    metrics_fn: Callable[[EpochMetrics], object] | None = None
    scheduler: Callable[..., Any] | None = None
    transform: Callable[[Any, torch.Tensor], Any] | None = None
    wishes: Wishes = Wishes()
    step_ms: tuple[float, ...] = ()  # per rank; empty: nobody is paced

    def build_model(self, device: torch.device) -> nn.Module:
        """The model on `device`. Raises BadConfig for one that cannot be trained here."""
        model = self.model if isinstance(self.model, nn.Module) else _call(self.model, device)
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model factory returned {type(model).__name__}, not an nn.Module")
        _refuse_untrainable(model)
        return model.to(device)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's parameters, built once they are where they will stay."""
        made = self.optimizer
        if not isinstance(made, Optimizer):
            made = made(list(model.parameters()))
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"the optimizer factory returned {type(made).__name__}, not a torch Optimizer"
            )
        if isinstance(made, torch.optim.LBFGS):
            raise BadConfig(
                "LBFGS calls the model several times per step",
                hint="Use an optimizer whose step() needs no closure.",
            )
        mine = {id(p) for p in model.parameters()}
        if not any(id(p) in mine for group in made.param_groups for p in group["params"]):
            raise BadConfig(
                "the optimizer holds none of the model's parameters",
                hint="Build it from the model that is given to Trainer, or give a factory.",
            )
        return made


def _call(factory: Callable[..., nn.Module], device: torch.device) -> nn.Module:
    """`model()` or `model(device)`, as its parameters say."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # a callable written in C
        return factory()
    if "device" in parameters:
        return factory(device=device)
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return factory(device) if len(needed) == 1 else factory()


def _refuse_untrainable(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise BadConfig(
            f"the model ({type(model).__name__}) has no parameters",
            hint="There is nothing to train; layers must be attributes or in an nn.ModuleList.",
        )
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise BadConfig(
                f"parameter {name!r} has no shape yet",
                hint="Call a lazy model once on a sample batch before giving it to Trainer.",
            )
