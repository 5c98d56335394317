"""Train and eval modes of a model's modules, put back as they were."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, each module has its own mode again afterwards.

    Module by module: a model of which parts are frozen is in both modes at once.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
