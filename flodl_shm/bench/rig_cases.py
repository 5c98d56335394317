"""What bench-rig runs: ranks of known speeds, for how long, and under which settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.options import Wishes
from flodl_shm.engine.config import RunConfig, Slow
from flodl_shm.ids import Rank
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.session import SlowDown

if TYPE_CHECKING:
    from pathlib import Path

QUICK_POLICIES = ("sync", "cadence")
# `equal` is local SGD: windows, but the same number of steps for all. `ddp` is torch's
# DistributedDataParallel in processes of its own, see rig_ddp.py.
POLICIES = ("sync", "equal", "cadence", "ddp")
# Where ranks meet after every batch, each batch is a window, so a fraction of the time has as
# many of them. In lockstep of the slowest, half of the time still has thirty windows.
PARTS = {"sync": 0.25, "equal": 0.5, "cadence": 1.0, "ddp": 0.25}
REPEATS = 3  # of a full run


@dataclass(frozen=True, slots=True)
class Rig:
    """Ranks of known speed, and how long the training of one row lasts."""

    name: str
    step_ms: tuple[float, ...]
    quick_s: float
    full_s: float
    epoch_s: float
    in_quick: bool = True
    stale: tuple[Rank, float] | None = None  # this rank is so much slower in every other epoch
    throttle: tuple[Rank, float] | None = None  # ... from the middle on


# A window of the default 10 steps of an 80 ms rank takes 0.8 s.
RIGS = (
    Rig("1:2:4", (20.0, 40.0, 80.0), quick_s=19.2, full_s=48.0, epoch_s=9.6),
    Rig("1:1:1", (20.0, 20.0, 20.0), quick_s=6.0, full_s=24.0, epoch_s=3.0),
    Rig(
        "8x4",  # eight ranks of four speeds
        (20.0, 20.0, 40.0, 40.0, 60.0, 60.0, 80.0, 80.0),
        quick_s=19.2,
        full_s=48.0,
        epoch_s=9.6,
        in_quick=False,
    ),
    # Epochs of three windows: by the time a speed is believed, it is another.
    Rig(
        "stale",
        (20.0, 40.0, 80.0),
        quick_s=21.6,
        full_s=48.0,
        epoch_s=2.4,
        in_quick=False,
        stale=(Rank(1), 1.3),
    ),
    Rig(
        "throttle",
        (20.0, 40.0, 80.0),
        quick_s=19.2,
        full_s=48.0,
        epoch_s=4.8,
        in_quick=False,
        throttle=(Rank(0), 2.0),
    ),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    quick: bool
    repeats: int
    free_run_s: float


QUICK = Effort(quick=True, repeats=1, free_run_s=3.0)
FULL = Effort(quick=False, repeats=REPEATS, free_run_s=5.0)


def config_of(rig: Rig, policy: str, effort: Effort, *, seed: int, root: Path) -> RunConfig:
    """One row's run: as many picks as the ranks, at their stated speeds, train in its time.

    That of `ddp` is what `sync` would run, for rig_ddp.py to read.
    """
    ranks = len(rig.step_ms)
    total_s = PARTS[policy] * (rig.quick_s if effort.quick else rig.full_s)
    per_s = sum(1000 / ms for ms in rig.step_ms)
    if policy != "cadence":
        per_s = ranks * 1000 / max(rig.step_ms)
    epochs = max(2 if rig.throttle else 1, round(total_s / rig.epoch_s))
    return RunConfig(
        ranks=ranks,
        devices=("cpu",) * ranks,
        workload="paced",
        workload_options={"step_ms": rig.step_ms, "picks": round(per_s * total_s / epochs)},
        wishes=_wishes(policy, ranks, epochs=epochs, seed=seed),
        slow=_slow(rig, epochs),
        free_run_s=effort.free_run_s,
        run_root=root,
        progress="none",
        quiet=True,
    )


def _wishes(policy: str, ranks: int, *, epochs: int, seed: int) -> Wishes:
    return Wishes(
        policy={"ddp": "sync", "equal": "cadence"}.get(policy, policy),
        epochs=epochs,
        batch_size=1,
        seed=seed,
        partition_ratios=(1 / ranks,) * ranks if policy == "equal" else None,
    )


def _slow(rig: Rig, epochs: int) -> tuple[Slow, ...]:
    if rig.throttle is not None:
        return (Slow(*rig.throttle, epochs // 2),)
    if rig.stale is None:
        return ()
    rank, factor = rig.stale
    return tuple(Slow(rank, factor if epoch % 2 else 1.0, epoch) for epoch in range(epochs))


def changed_at(rig: Rig, config: RunConfig) -> int | None:
    """The epoch from which on the throttled rank is slower; None where nobody is throttled."""
    return config.slow[0].from_epoch if rig.throttle else None


def slowed_s(config: RunConfig, rank: Rank, epoch: int) -> float:
    """How much longer than in the free run, which is of epoch 0, a pick takes in an epoch."""
    pacer = Pacer(slow=slow_downs(config, rank))
    return (pacer.factor(epoch) - pacer.factor(0)) * step_ms_of(config)[rank] / 1e3


def step_ms_of(config: RunConfig) -> tuple[float, ...]:
    """The stated time of a step, by rank."""
    return tuple(config.workload_options["step_ms"])  # type: ignore[arg-type]


def slow_downs(config: RunConfig, rank: Rank) -> tuple[SlowDown, ...]:
    """What a rank's pacer is told of `--slow`."""
    return tuple(SlowDown(one.factor, one.from_epoch) for one in config.slow_of(rank))
