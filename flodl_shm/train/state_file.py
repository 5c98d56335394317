"""A TrainedState as a file: how ranks hand it to the script that launched them.

safetensors, so reading it runs nothing; `params/NAME` and `buffers/NAME`, the rest as metadata.
The file appears whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flodl_shm.errors import HostUnfit
from flodl_shm.train.state import TrainedState

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def save_state(state: TrainedState, path: Path) -> None:
    """Write it. Raises HostUnfit with the path when the disk refuses."""
    tensors = {f"params/{name}": tensor for name, tensor in state.params.items()}
    tensors |= {f"buffers/{name}": tensor for name, tensor in state.buffers.items()}
    facts = {"status": state.status, "global_step": str(state.global_step)}
    if state.evaluation is not None:
        facts["evaluation"] = repr(state.evaluation)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, facts)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise HostUnfit(f"cannot write the trained state to {path}: {error}") from None


def load_state(path: Path) -> TrainedState:
    """What `save_state` wrote. Raises HostUnfit when it cannot be read."""
    parts: dict[str, dict[str, Tensor]] = {"params": {}, "buffers": {}}
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata()
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                part, _, name = key.partition("/")
                parts[part][name] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise HostUnfit(f"cannot read the trained state in {path}: {error}") from None
    score = facts.get("evaluation")
    return TrainedState(
        **parts,
        status=facts["status"],
        global_step=int(facts["global_step"]),
        evaluation=None if score is None else float(score),
    )
