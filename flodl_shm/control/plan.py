"""From what was asked for to the one plan everybody follows.

Flags, environment and config file are one word by the time they come here (the command line
merges them); the script's own arguments come second, the defaults last. Every rule that joins
two settings, or a setting and the data, is checked here and nowhere else.
"""

from __future__ import annotations

import math

from flodl_shm.control.messages import Settled, Wishes
from flodl_shm.errors import BadConfig

POLICIES = ("sync", "cadence")
TAILS = ("drop",)

DEFAULTS = Wishes(
    policy="cadence",
    epochs=1,
    batch_size=32,
    seed=0,
    tail="drop",
    anchor=10,
    max_anchor=1000,
    overhead_target=0.05,
    gamma=1.0,
)


def merge(*by_authority: Wishes) -> dict[str, object]:
    """The first word said about each option, the highest authority first."""
    settled: dict[str, object] = {}
    for wishes in by_authority:
        for name in Wishes.__struct_fields__:
            value = getattr(wishes, name)
            if value is not None:
                settled.setdefault(name, value)
    return settled


def check(wishes: Wishes) -> None:
    """Refuse values that no data set could make right. Raises BadConfig."""
    if wishes.policy is not None and wishes.policy not in POLICIES:
        raise BadConfig(
            f"policy {wishes.policy!r} is not one of {', '.join(POLICIES)}",
            hint="choose one of them with --policy or Trainer(policy=...)",
        )
    if wishes.tail is not None and wishes.tail not in TAILS:
        raise BadConfig(f"tail {wishes.tail!r} is not one of {', '.join(TAILS)}")
    for name in ("epochs", "batch_size", "anchor", "max_anchor"):
        value = getattr(wishes, name)
        if value is not None and value < 1:
            raise BadConfig(f"{name} is {value}", hint="it must be at least 1")
    if wishes.seed is not None and wishes.seed < 0:
        raise BadConfig(f"seed is {wishes.seed}", hint="it must not be negative")
    target = wishes.overhead_target
    if target is not None and not 0.01 <= target <= 0.5:
        raise BadConfig(f"overhead_target is {target}", hint="it must lie between 0.01 and 0.5")
    if wishes.gamma is not None and not math.isfinite(wishes.gamma):
        raise BadConfig(f"gamma is {wishes.gamma}", hint="it must be a finite number")
    norm = wishes.max_grad_norm
    if norm is not None and not norm > 0:
        raise BadConfig(f"max_grad_norm is {norm}", hint="it must be greater than 0")
    anchor, most = wishes.anchor, wishes.max_anchor
    if anchor is not None and most is not None and anchor > most:
        raise BadConfig(f"anchor {anchor} is greater than max_anchor {most}")


def settle(flags: Wishes, script: Wishes, *, world_size: int, samples: int) -> Settled:
    """The plan of a run over `samples` samples. Raises BadConfig with values and remedy."""
    check(flags)
    check(script)
    said = merge(flags, script, DEFAULTS)
    merged = Wishes(**said)  # type: ignore[arg-type]
    check(merged)
    plan = Settled(world_size=world_size, samples=samples, **said)  # type: ignore[arg-type]
    if samples == 0:
        raise BadConfig("the dataset is empty", hint="give it at least one batch for each rank")
    if samples < world_size * plan.batch_size:
        raise BadConfig(
            f"the dataset has {samples} samples, fewer than {world_size} ranks x batch size "
            f"{plan.batch_size} = {world_size * plan.batch_size}",
            hint="use a smaller --batch-size or fewer --ranks",
        )
    return plan


def mass(steps: int, gamma: float) -> float:
    """A rank's weight in the parameter mean: steps**gamma, and 0 for a rank that did not move.

    The guard matters for every gamma: 0**0 is 1 and 0**-1 has no value (floDl, realized work).
    """
    return float(steps) ** gamma if steps > 0 else 0.0
