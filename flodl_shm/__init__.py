"""Train one model on unequal devices: each rank at its own speed, one consensus.

    import flodl_shm as fl
    state = fl.Trainer(model, optimizer, train_step, dataset=data, epochs=5).run()

The names come lazily, so that importing the package costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flodl_shm.errors import FlodlError

if TYPE_CHECKING:
    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.train.cooperative import EvalResult, Plan, StepOutcome, Worker
    from flodl_shm.train.epoch_handle import EpochHandle
    from flodl_shm.train.scalars import record_scalar
    from flodl_shm.train.state import TrainedState
    from flodl_shm.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "EpochHandle",
    "EpochMetrics",
    "EvalResult",
    "FlodlError",
    "Plan",
    "StepOutcome",
    "TrainedState",
    "Trainer",
    "Worker",
    "__version__",
    "record_scalar",
]

_HOMES = {
    "EpochHandle": "flodl_shm.train.epoch_handle",
    "EpochMetrics": "flodl_shm.control.messages",
    "EvalResult": "flodl_shm.train.cooperative",
    "Plan": "flodl_shm.train.cooperative",
    "StepOutcome": "flodl_shm.train.cooperative",
    "TrainedState": "flodl_shm.train.state",
    "Trainer": "flodl_shm.train.trainer",
    "Worker": "flodl_shm.train.cooperative",
    "record_scalar": "flodl_shm.train.scalars",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
