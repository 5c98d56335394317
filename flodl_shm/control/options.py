"""Options of a training: as they were asked for, and as all follow them.

Which word counts and which combinations hold is decided in control/plan.py.
"""

from __future__ import annotations

import math

import msgspec

from flodl_shm.ids import Rank

CALLBACK_TIMEOUT_S = 600.0  # of a user's function, unless somebody says otherwise


class Survival(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank's death means for the run. Settled outside of the script."""

    max_failures: int | float | None = None  # ranks that may be missing, or a part of them
    on_death: str = "continue"  # or "abort": the first death ends the run
    restarts: int = 0  # how often each rank may come back
    rejoin_optimizer: str = "fresh"  # or "peer": who comes back has a living rank's state
    grace_s: float = 30.0  # a run that ends because of deaths has this long for its last save


class Wishes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options as somebody gave them; None means "not said". See control/plan.py for who wins."""

    policy: str | None = None
    epochs: int | None = None
    batch_size: int | tuple[int, ...] | None = None  # one for all ranks, or one for each
    seed: int | None = None
    tail: str | None = None
    anchor: int | None = None
    max_anchor: int | None = None
    overhead_target: float | None = None
    gamma: float | None = None
    max_grad_norm: float | None = None
    augment: int | None = None
    partition_ratios: tuple[float, ...] | None = None
    speed_hint: tuple[Rank, float] | None = None  # slowest rank, how many times faster others are
    max_batch_diff: int | None = None
    eval_every: int | None = None
    save_every: int | None = None
    save_at_end: bool | None = None
    epoch_callback_rank: str | None = None
    metrics_on_rank: bool | None = None
    can_save: bool | None = None
    callback_timeout_s: float | None = None
    survival: Survival | None = None


class Settled(msgspec.Struct, frozen=True):
    """The plan every rank and the coordinator follow, all words heard and all rules checked."""

    policy: str
    world_size: int
    epochs: int
    batch_sizes: tuple[int, ...]  # picks of one batch, by rank
    seed: int
    tail: str
    samples: int
    augment: int
    anchor: int
    max_anchor: int
    overhead_target: float
    gamma: float
    eval_every: int  # epochs between evaluations; 0: only the final one
    max_grad_norm: float | None = None
    partition_ratios: tuple[float, ...] = ()
    speed_hint: tuple[Rank, float] | None = None
    max_batch_diff: int | None = None
    save_every: int = 0  # epochs between checkpoints; 0: none because of an epoch's end
    save_at_end: bool = False  # one more after the final reduce
    epoch_callback_rank: str = "fastest"  # or a rank's number: see control/roles.py
    metrics_on_rank: bool = True  # a rank calls the metrics function; False: the launcher does
    can_save: bool = False  # somebody publishes what ranks save; else no save is ever asked for
    callback_timeout_s: float = CALLBACK_TIMEOUT_S  # a save is given up then, too
    survival: Survival = Survival()

    @property
    def batch_size(self) -> int | tuple[int, ...]:
        """As a user says it: one number where all ranks have the same."""
        same = len(set(self.batch_sizes)) == 1
        return self.batch_sizes[0] if same else self.batch_sizes

    @property
    def picks(self) -> int:
        """Picks there are in one pass over the data: samples x augmentations."""
        return self.samples * self.augment

    @property
    def epoch_picks(self) -> int:
        """Picks dealt in one epoch. Under tail "drop" what fills no batch is left out."""
        return self.picks if self.tail == "keep" else self.picks - self.picks % self.pick_unit

    @property
    def pick_unit(self) -> int:
        """The largest number of picks of which every rank's batch is a multiple."""
        return math.gcd(*self.batch_sizes)
