"""One optimizer step: everything between having a batch and having moved the parameters.

One batch is one step: `train_step` must return a loss. A user who wants to skip an update returns
a loss whose gradient is zero. Whose own loop computes loss and gradients, asks for the rest only:
`clear` before, `update` after. The clock is the caller's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from flodl_shm.train.finite import mend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer


class _Losses(Protocol):
    def add(self, loss: Tensor) -> None: ...
    def take(self) -> tuple[float, int]: ...


class HostLosses:
    """Sums finite losses as they come: reading a CPU tensor costs about a microsecond."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, loss: Tensor) -> None:
        value = loss.item()
        if math.isfinite(value):
            self._sum += value
            self._count += 1

    def take(self) -> tuple[float, int]:
        """Sum and number of the finite losses since the last call."""
        taken = self._sum, self._count
        self._sum, self._count = 0.0, 0
        return taken


class DeviceLosses:
    """Sums finite losses on the device; the host waits for them once, in `take`."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: Tensor) -> None:
        value = loss.detach()
        finite = torch.isfinite(value)
        self._sum += torch.where(finite, value, 0)
        self._count += finite

    def take(self) -> tuple[float, int]:
        """Sum and number of the finite losses since the last call; waits for the device."""
        taken = float(self._sum.item()), int(self._count.item())
        self._sum.zero_()
        self._count.zero_()
        return taken


class Leash:
    """Keeps the host at most one step ahead of a CUDA device.

    Without it the host would queue a whole window in milliseconds: its clock would say nothing
    about the device, and peers would see the window's end before it began. One step of lead keeps
    the device busy while the host prepares the next batch.
    """

    def __init__(self) -> None:
        self._events = (torch.cuda.Event(), torch.cuda.Event())
        self._recorded = 0

    def follow(self) -> None:
        """Mark the end of the step just queued; wait for the one before it."""
        self._events[self._recorded % 2].record()
        self._recorded += 1
        if self._recorded > 1:
            self._events[self._recorded % 2].synchronize()

    def catch_up(self) -> None:
        """Wait for everything that was queued."""
        if self._recorded:
            self._events[(self._recorded - 1) % 2].synchronize()


class Stepper:
    """Runs the user's step and moves the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: Callable[[nn.Module, Any], Tensor],
        *,
        max_grad_norm: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        on_cuda = device is not None and device.type == "cuda"
        self._model = model
        self._optimizer = optimizer
        self._train_step = train_step
        self._max_grad_norm = max_grad_norm
        self._parameters = list(model.parameters())
        self._leash = Leash() if on_cuda else None
        self._losses: _Losses = HostLosses()
        if device is not None and device.type != "cpu":
            self._losses = DeviceLosses(device)

    def step(self, batch: Any) -> None:
        """One update from `batch`. Raises TypeError if train_step returned no usable loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._train_step(self._model, batch)
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.dim() == 0):
            raise TypeError(f"{_where(self._train_step)} {_fault(loss)}")
        loss.backward()
        self.update(loss)

    def clear(self) -> None:
        """Forget all gradients, as `step` does first."""
        self._optimizer.zero_grad(set_to_none=True)

    def update(self, loss: Tensor) -> None:
        """Move the parameters by the gradients there are, and keep the loss."""
        if self._max_grad_norm is not None:
            clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._optimizer.step()
        self._losses.add(loss)
        if self._leash is not None:
            self._leash.follow()

    def mend(self) -> int:
        """Forget what of the optimizer's state is not finite; of how many parameters it was."""
        return mend(self._optimizer)

    def catch_up(self) -> None:
        """Wait until the device has done every step; on a CPU it always has."""
        if self._leash is not None:
            self._leash.catch_up()

    def take_losses(self) -> tuple[float, int]:
        """Sum and number of the finite losses since the last call."""
        return self._losses.take()


def _where(function: Callable[..., Any]) -> str:
    """Name and place of the user's function: it has returned, so no traceback shows it."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    said = "train_step" if name == "train_step" else f"train_step {name}"
    return f"{said}{place}"


def _fault(loss: object) -> str:
    """What is wrong with something that should have been a loss."""
    wanted = "it must return the loss, a floating-point tensor without dimensions"
    if not isinstance(loss, Tensor):
        return f"returned {type(loss).__name__}: {wanted}"
    if not loss.is_floating_point():
        return f"returned a tensor of {loss.dtype}: {wanted}"
    if loss.dim():
        return f"returned a tensor of shape {tuple(loss.shape)} and {loss.dtype}: {wanted}"
    return "returned a loss that depends on no trainable parameter: it cannot be differentiated"
