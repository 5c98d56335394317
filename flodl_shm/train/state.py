"""What is left after training: the consensus, in memory of its own, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flodl_shm.errors import BadConfig, HostUnfit
from flodl_shm.train.checkpoint.durable import why
from flodl_shm.train.checkpoint.names import MODEL
from flodl_shm.train.checkpoint.tensors import copied, write_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


@dataclass(frozen=True)
class TrainedState:
    """Parameters (tied ones once) and persistent buffers by name: CPU tensors, copied out."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    status: str = "ok"  # ok | stopped | failed
    global_step: int = 0  # optimizer steps of all ranks in the consensus
    evaluation: float | None = None  # of the consensus, on the rank that scored it

    @classmethod
    def of(cls, model: nn.Module) -> TrainedState:
        """Copy the state of `model` out. Dtypes are kept."""
        params = {name: _copy(p) for name, p in model.named_parameters()}
        buffers = {name: _copy(b) for name, b in persistent_buffers(model).items()}
        return cls(params, buffers)

    def load_into(self, model: nn.Module) -> None:
        """Copy the state into a model of the same architecture, on whatever device it is.

        Raises BadConfig if a name or a shape differs; the model is untouched then.
        """
        pairs = _match(self.params, dict(model.named_parameters()), "parameter")
        pairs += _match(self.buffers, persistent_buffers(model), "buffer")
        with torch.no_grad():
            for mine, theirs in pairs:
                theirs.copy_(mine)

    def save_pretrained(self, folder: Path | str) -> Path:
        """Write folder/model.safetensors, which plain `safetensors.torch.load_file` opens.

        Makes the folder; the file appears whole, in place of an older one. Raises HostUnfit when
        the disk refuses, BadConfig for a tensor that no file can hold.
        """
        folder = Path(folder)
        tensors = {
            name: copied(tensor, f"the state's {name!r}")
            for name, tensor in (self.params | self.buffers).items()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(folder, MODEL, tensors, {"format": "pt"})
        except OSError as error:
            raise HostUnfit(f"cannot write the trained state: {why(error)}") from None
        return folder / MODEL


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers a state_dict holds, each once, by its first name."""
    return {name: buffer for name, buffer in model.named_buffers() if _is_persistent(model, name)}


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _match(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], kind: str
) -> list[tuple[Tensor, Tensor]]:
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        raise BadConfig(
            f"the model does not fit the trained state: {kind} {odd[0]!r} is in only one of them",
            hint="Load into a model of the same architecture.",
        )
    for name, tensor in mine.items():
        if tensor.shape != theirs[name].shape:
            raise BadConfig(
                f"the model does not fit the trained state: {kind} {name!r} has shape"
                f" {tuple(theirs[name].shape)}, the state {tuple(tensor.shape)}",
                hint="Load into a model of the same architecture.",
            )
    return [(tensor, theirs[name]) for name, tensor in mine.items()]
