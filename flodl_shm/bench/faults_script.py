"""What bench-faults trains: `paced`, with a replica of any size and faults on order.

Run as a module in every rank. A file `order-raise-N` or `order-nan-N` in the place for orders
makes rank N raise in its next step, or lose its numbers there; the rank removes the file and
writes down when it did so, on the clock everybody shares.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flodl_shm.bench.striker import Struck, note
from flodl_shm.ids import Nanos, Rank
from flodl_shm.train.trainer import Trainer
from flodl_shm.workloads import build
from flodl_shm.workloads.paced import FEATURES, train_step


class Padded(nn.Module):
    """The layer that is trained, and so many floats that are only averaged."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.padding = nn.Parameter(torch.ones(floats), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer does."""
        out: Tensor = self.layer(x)
        return out


class Ordered(Exception):
    """The failure of a user's code that was asked for."""


class Steps:
    """The training step, which looks for orders first."""

    def __init__(self, place: Path, rank: int) -> None:
        self._place, self._rank = place, rank
        self._orders = {do: str(place / f"order-{do}-{rank}") for do in ("raise", "nan")}

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error, unless something else is wanted."""
        loss = train_step(model, batch)
        for do, file in self._orders.items():
            if os.path.exists(file):
                os.unlink(file)
                self._carry_out(do, model)
        return loss

    def _carry_out(self, do: str, model: nn.Module) -> None:
        note(self._place, Struck(do, Rank(self._rank), Nanos(time.monotonic_ns())))
        if do == "raise":
            raise Ordered("ordered by bench-faults")
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)


def main() -> None:
    """Train until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--floats", type=int, required=True, help="of the padding")
    parser.add_argument("--picks", type=int, required=True, help="of an epoch")
    parser.add_argument("--step-ms", type=float, nargs="+", required=True)
    parser.add_argument("--orders", type=Path, required=True)
    given = parser.parse_args()
    arguments: dict[str, Any] = build("paced", picks=given.picks, step_ms=tuple(given.step_ms))
    arguments["model"] = lambda: Padded(given.floats)
    arguments["train_step"] = Steps(given.orders, int(os.environ["RANK"]))
    Trainer(**arguments).run()


if __name__ == "__main__":
    main()
