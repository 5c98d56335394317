"""States of the random generators that train/seeds.py seeds: read, and set again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


def states(device: torch.device) -> dict[str, Any]:
    """Of torch on the CPU, and on `device` if that is CUDA, of numpy's global one and random."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def put_back(found: Mapping[str, Any], device: torch.device) -> bool:
    """Set all of them; False, and none is set, if a saved one is missing for this device.

    Raises ValueError, TypeError, LookupError, ArithmeticError or RuntimeError for damaged states;
    some may be set then.
    """
    if device.type == "cuda" and "cuda" not in found:
        return False
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)
    return True
