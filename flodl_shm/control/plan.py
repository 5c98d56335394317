"""From what was asked for to the one plan everybody follows.

Flags, environment and config file are one word by the time they come here (the command line
merges them); the script's own arguments come second, the defaults last. Every rule that joins
two settings, or a setting and the data, is checked here and nowhere else.
"""

from __future__ import annotations

import math
import re

from flodl_shm.control.options import CALLBACK_TIMEOUT_S, Settled, Survival, Wishes
from flodl_shm.control.roles import FASTEST
from flodl_shm.errors import BadConfig

POLICIES = ("sync", "cadence")
TAILS = ("drop", "keep")

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
    augment=1,
    eval_every=0,
    save_every=0,
    save_at_end=False,
    epoch_callback_rank=FASTEST,
    metrics_on_rank=True,
    can_save=False,
    callback_timeout_s=CALLBACK_TIMEOUT_S,
    survival=Survival(),
)
COUNTS = (
    "epochs",
    "batch_size",
    "anchor",
    "max_anchor",
    "augment",
    "max_batch_diff",
    "eval_every",
    "save_every",
)
LARGEST_COUNT = 2**31 - 1  # nobody means more, and products of two still fit a message
LARGEST_WHOLE = 2**63 - 1  # what a message can carry
LONGEST_STEP_MS = 1e9  # eleven days; the longest sleep there is lies somewhere above
LONGEST_WAIT_S = 1e9  # thirty years; in nanoseconds it still fits what a clock counts in
RATIO_SLACK = 1e-3  # of the sum of ratios: 0.33 three times is meant as thirds


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
            hint="Choose one of them with --policy or Trainer(policy=...).",
        )
    if wishes.tail is not None and wishes.tail not in TAILS:
        raise BadConfig(f"tail {wishes.tail!r} is not one of {', '.join(TAILS)}")
    for name in ("epochs", "anchor", "max_anchor", "augment"):
        value = getattr(wishes, name)
        if value is not None and value < 1:
            raise BadConfig(f"{name} is {value}", hint="It must be at least 1.")
    for size in _sizes(wishes.batch_size):
        if size < 1:
            raise BadConfig(f"batch_size is {size}", hint="It must be at least 1.")
    for name in COUNTS:
        if max(_sizes(getattr(wishes, name)), default=0) > LARGEST_COUNT:
            raise BadConfig(f"{name} is {getattr(wishes, name)}", hint=f"{LARGEST_COUNT} at most.")
    for name in ("max_batch_diff", "eval_every", "save_every"):
        value = getattr(wishes, name)
        if value is not None and value < 0:
            raise BadConfig(f"{name} is {value}", hint="It must not be negative.")
    if wishes.seed is not None and wishes.seed < 0:
        raise BadConfig(f"seed is {wishes.seed}", hint="It must not be negative.")
    target = wishes.overhead_target
    if target is not None and not 0.01 <= target <= 0.5:
        raise BadConfig(f"overhead_target is {target}", hint="It must lie between 0.01 and 0.5.")
    if wishes.gamma is not None and not math.isfinite(wishes.gamma):
        raise BadConfig(f"gamma is {wishes.gamma}", hint="It must be a finite number.")
    norm = wishes.max_grad_norm
    if norm is not None and not norm > 0:
        raise BadConfig(f"max_grad_norm is {norm}", hint="It must be greater than 0.")
    _check_callbacks(wishes)
    anchor, most = wishes.anchor, wishes.max_anchor
    if anchor is not None and most is not None and anchor > most:
        raise BadConfig(f"anchor {anchor} is greater than max_anchor {most}")


def _check_callbacks(wishes: Wishes) -> None:
    policy = wishes.epoch_callback_rank
    # ASCII digits only: str.isdigit knows others, and int() reads signs and underscores.
    if policy is not None and policy != FASTEST and not re.fullmatch("[0-9]{1,9}", policy):
        raise BadConfig(
            f"epoch_callback_rank is {policy!r}", hint=f"Give {FASTEST!r} or a rank's number."
        )
    timeout_s = wishes.callback_timeout_s
    if timeout_s is not None and not 0 < timeout_s <= LONGEST_WAIT_S:
        raise BadConfig(
            f"callback_timeout_s is {timeout_s:g}",
            hint=f"It must be greater than 0 and {LONGEST_WAIT_S:g} seconds at most.",
        )


def settle(flags: Wishes, script: Wishes, *, world_size: int, samples: int) -> Settled:
    """The plan of a run over `samples` samples. Raises BadConfig with values and remedy."""
    check(flags)
    check(script)
    said = merge(flags, script, DEFAULTS)
    # Option by option the values have the types of Wishes; a dict of them cannot say so.
    check(Wishes(**said))  # type: ignore[arg-type]
    sizes = _sizes(said.pop("batch_size"))  # type: ignore[arg-type]
    plan = Settled(
        world_size=world_size,
        samples=samples,
        batch_sizes=sizes * world_size if len(sizes) == 1 else sizes,
        **said,  # type: ignore[arg-type]
    )
    _check_ranks(plan)
    _check_data(plan)
    return plan


def check_ranks(wishes: Wishes, world_size: int) -> None:
    """Refuse what names ranks that are not there. Raises BadConfig."""
    sizes = _sizes(wishes.batch_size)
    if len(sizes) > 1 and len(sizes) != world_size:
        raise BadConfig(
            f"{len(sizes)} batch sizes are given for {world_size} ranks",
            hint="Give one for all, or one for each rank.",
        )
    ratios = wishes.partition_ratios
    if ratios is not None:
        _check_ratios(ratios, world_size)
    if wishes.speed_hint is not None:
        rank, times = wishes.speed_hint
        if not 0 <= rank < world_size:
            raise BadConfig(f"the speed hint names rank {rank} of {world_size} ranks")
        if not (math.isfinite(times) and times >= 1):
            raise BadConfig(
                f"the speed hint {rank}:{times:g} says the others are {times:g} times as fast",
                hint="Name the slowest rank and a factor of at least 1.",
            )
    named = wishes.epoch_callback_rank
    if named is not None and named != FASTEST and int(named) >= world_size:
        raise BadConfig(
            f"epoch_callback_rank names rank {named} of {world_size} ranks",
            hint=f"Give {FASTEST!r} or a rank from 0 to {world_size - 1}.",
        )


def _check_ratios(ratios: tuple[float, ...], world_size: int) -> None:
    if len(ratios) != world_size:
        raise BadConfig(f"{len(ratios)} partition ratios are given for {world_size} ranks")
    if not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        raise BadConfig(f"partition ratios {ratios} are not all greater than 0")
    total = sum(ratios)
    if abs(total - 1) > RATIO_SLACK:
        raise BadConfig(
            f"partition ratios {', '.join(f'{r:g}' for r in ratios)} sum to {total:g}",
            hint="They must sum to 1.",
        )


def _check_ranks(plan: Settled) -> None:
    check_ranks(
        Wishes(
            batch_size=plan.batch_sizes,
            partition_ratios=plan.partition_ratios or None,
            speed_hint=plan.speed_hint,
            epoch_callback_rank=plan.epoch_callback_rank,
        ),
        plan.world_size,
    )


def _check_data(plan: Settled) -> None:
    if plan.samples == 0:
        raise BadConfig("the dataset is empty", hint="Give it at least one batch for each rank.")
    if plan.picks > LARGEST_WHOLE:
        raise BadConfig(
            f"an epoch of {plan.samples} samples x --augment {plan.augment} has too many picks"
        )
    need = sum(plan.batch_sizes)
    if plan.picks >= need:
        return
    sizes = " + ".join(str(size) for size in plan.batch_sizes)
    if len(set(plan.batch_sizes)) == 1:
        sizes = f"{plan.world_size} ranks x batch size {plan.batch_sizes[0]}"
    augmented = f" ({plan.picks} with --augment {plan.augment})" if plan.augment > 1 else ""
    raise BadConfig(
        f"the dataset has {plan.samples} samples{augmented}, fewer than {sizes} = {need}",
        hint="Use a smaller --batch-size or fewer --ranks.",
    )


def _sizes(given: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Batch sizes as they were given: none, one for all, or one for each rank."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
