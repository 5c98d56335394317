"""What one run was asked to be: settled once on the command line, checked here, passed down.

RunConfig knows the rules that hold whatever script is run. What a script may also ask for
(`wishes`) is settled later, when the ranks have spoken: see control/plan.py. This module must not
know where a value came from beyond naming it, and reads no environment.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_shm.control import plan
from flodl_shm.control.ledger import Ledger
from flodl_shm.control.options import CALLBACK_TIMEOUT_S, Survival, Wishes
from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.engine.ticket import Earlier
    from flodl_shm.ids import Rank

STARTS = ("fork", "spawn")
PROGRESS_MODES = ("auto", "live", "line", "json", "none")
SHOWN_RANKS = ("0", "all", "errors")
MOST_RESTARTS = 1000  # of each rank; a slip of the keyboard is above
MAX_RANKS = 256  # far above one host; a slip of the keyboard must not fork ten thousand processes
SLOWEST = 1e6  # as a factor: a step of a millisecond takes a quarter of an hour
LARGEST_SEED = 2**63 - 1  # torch.manual_seed takes no more
DEVICE = re.compile(r"cpu|cuda:\d+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # becomes a part of a directory's name
PACED = "paced"  # the only workload with options of its own
PACED_OPTIONS = ("step_ms", "picks")

# Only ElChe reads these, and under `sync` every window is one batch.
NEEDS_WINDOWS = (
    "anchor",
    "max_anchor",
    "overhead_target",
    "gamma",
    "max_batch_diff",
    "speed_hint",
    "partition_ratios",
)

OptionValue = int | float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Slow:
    """`--slow RANK:FACTOR[@EPOCH]`: from that epoch on the rank takes FACTOR times as long."""

    rank: Rank
    factor: float
    from_epoch: int = 0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise BadConfig(f"--slow names rank {self.rank}, but ranks count from 0")
        if not 1 <= self.factor <= SLOWEST:  # which nan is neither
            raise BadConfig(
                f"--slow {self.rank}:{self.factor:g}: a factor is at least 1",
                hint=f"2 makes a rank take twice as long; it is {SLOWEST:g} at most.",
            )
        if self.from_epoch < 0:
            raise BadConfig(f"--slow {self}: epochs count from 0")

    def __str__(self) -> str:
        start = f"@{self.from_epoch}" if self.from_epoch else ""
        return f"{self.rank}:{self.factor:g}{start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run. Exactly one of `script`, `module` and `workload` is set.

    Raises BadConfig on any value or combination that cannot hold, in one sentence.
    """

    ranks: int
    devices: tuple[str, ...]  # one per rank, "cpu" or "cuda:N"
    script: Path | None = None
    module: str | None = None
    script_args: tuple[str, ...] = ()
    workload: str | None = None
    workload_options: Mapping[str, OptionValue] = field(default_factory=dict)
    config_file: Path | None = None  # where some of the rest was said
    wishes: Wishes = Wishes()
    backend: str = "shm"
    start: str = "fork"
    slow: tuple[Slow, ...] = ()
    dead_after_s: float = 5.0
    stall_timeout_s: float = 300.0
    grace_s: float = 30.0
    save: Path | None = None  # stem of checkpoint directories; None: in the run's own directory
    keep: int | None = None  # newest checkpoints that stay; None: all
    resume: str | None = None  # "auto", a stem, or one checkpoint's directory
    callback_timeout_s: float = CALLBACK_TIMEOUT_S
    survival: Survival = Survival()
    run_root: Path = Path("runs")
    name: str | None = None
    progress: str = "auto"
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES as it stands
    plain: str = ""  # why nothing should be drawn on this terminal, see engine/view.py
    show_ranks: str = "0"
    summary: Path | None = None
    quiet: bool = False
    verbose: int = 0
    dry_run: bool = False
    as_json: bool = False  # the summary, and nothing else, on stdout
    threads: int | None = None  # the user's OMP_NUM_THREADS; None: the cores are shared out
    free_run_s: float = 0.0  # for benchmarks, no option: see train/free_run.py
    # Of a script that launches its own ranks, what its run()s before this one brought; None: it
    # does not. See engine/self_launch.py.
    earlier: tuple[Earlier, ...] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # option -> where its value is from

    def __post_init__(self) -> None:
        self._check_what_runs()
        self._check_ranks()
        self._check_wishes()
        self._check_workload_options()
        self._check_slow()
        self._check_limits()
        self._check_survival()
        self._check_saves()
        self._check_view()

    @property
    def title(self) -> str:
        """What is trained, in a word: the workload, the module or the script's name."""
        return self.workload or self.module or (self.script.name if self.script else "")

    def slow_of(self, rank: Rank) -> tuple[Slow, ...]:
        """The slow-downs of one rank, in the order of their epochs."""
        return tuple(
            sorted((s for s in self.slow if s.rank == rank), key=lambda one: one.from_epoch)
        )

    def _check_what_runs(self) -> None:
        given = [
            word
            for word, value in (
                ("a script", self.script),
                ("-m MODULE", self.module),
                ("--workload", self.workload),
            )
            if value is not None
        ]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise BadConfig(
                f"asked to run {what}", hint="Give one of SCRIPT, -m MODULE and --workload NAME."
            )
        if self.workload and self.script_args:
            raise BadConfig(f"workload {self.workload} takes no arguments: {self.script_args[0]}")

    def _check_ranks(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise BadConfig(f"--ranks {self.ranks}: between 1 and {MAX_RANKS} ranks can run")
        if len(self.devices) != self.ranks:
            raise BadConfig(f"{self.ranks} ranks but {len(self.devices)} devices")
        for device in self.devices:
            if not DEVICE.fullmatch(device):
                raise BadConfig(
                    f"--devices names {device!r}", hint="A device is cpu or cuda:N, as cuda:0."
                )

    def _check_wishes(self) -> None:
        wishes = self.wishes
        plan.check(wishes)
        plan.check_ranks(wishes, self.ranks)
        if wishes.seed is not None and wishes.seed > LARGEST_SEED:
            raise BadConfig(f"--seed {wishes.seed} is above {LARGEST_SEED}")
        if wishes.partition_ratios is not None and wishes.speed_hint is not None:
            raise BadConfig(
                "--speed-hint has no effect beside --partition-ratios",
                hint="Fixed shares are never guessed.",
            )
        if wishes.policy == "sync":
            for name in NEEDS_WINDOWS:
                if getattr(wishes, name) is not None:
                    raise BadConfig(
                        f"{flag(name)} has no effect under --policy sync",
                        hint="There every window is one batch.",
                    )

    def _check_workload_options(self) -> None:
        for name, value in self.workload_options.items():
            if self.workload != PACED or name not in PACED_OPTIONS:
                raise BadConfig(
                    f"{flag(name)} has no effect on {self.title}",
                    hint=f"It belongs to --workload {PACED}.",
                )
            if name == "picks" and not (isinstance(value, int) and value >= 1):
                raise BadConfig(f"--picks {value}: at least 1")
            if name == "step_ms":
                self._check_step_ms(value)

    def _check_step_ms(self, value: OptionValue) -> None:
        if not isinstance(value, tuple) or len(value) != self.ranks:
            count = len(value) if isinstance(value, tuple) else 1
            raise BadConfig(f"--step-ms has {count} entries for {self.ranks} ranks")
        for step_ms in value:
            if not 0 < step_ms <= plan.LONGEST_STEP_MS:  # which nan is neither
                raise BadConfig(
                    f"--step-ms {step_ms:g}: a step takes more than 0 ms",
                    hint=f"And {plan.LONGEST_STEP_MS:g} ms at most.",
                )

    def _check_slow(self) -> None:
        seen = set()
        for one in self.slow:
            if one.rank >= self.ranks:
                raise BadConfig(
                    f"--slow {one} names rank {one.rank}, but there are {self.ranks} ranks",
                    hint="Ranks count from 0.",
                )
            if (one.rank, one.from_epoch) in seen:
                raise BadConfig(f"--slow {one}: rank {one.rank} has a factor there already")
            seen.add((one.rank, one.from_epoch))

    def _check_limits(self) -> None:
        if self.backend != "shm":
            raise BadConfig(f"--backend {self.backend} is not available in this version")
        if self.start not in STARTS:
            raise BadConfig(f"--start {self.start}: known are {', '.join(STARTS)}")
        if self.start == "spawn" and not Path(sys.executable or "/").is_file():
            raise BadConfig(
                f"--start spawn: there is no interpreter at {sys.executable!r} to start",
                hint="Use --start fork.",
            )
        if self.threads is not None and self.threads < 1:
            raise BadConfig(f"OMP_NUM_THREADS is {self.threads}: at least 1")
        _seconds("dead_after", self.dead_after_s)
        _seconds("stall_timeout", self.stall_timeout_s)
        _seconds("grace", self.grace_s, zero=True)
        _seconds("free_run", self.free_run_s, zero=True)
        if self.name is not None and not NAME.fullmatch(self.name):
            raise BadConfig(
                f"--name {self.name!r} cannot be part of a directory's name",
                hint="Letters, digits, dots, dashes and underscores, at most 64.",
            )

    def _check_survival(self) -> None:
        survival, ranks = self.survival, self.ranks
        restarts, most = survival.restarts, survival.max_failures
        Ledger(ranks, max_failures=most)  # it knows what a limit can be
        if survival.on_death not in ("continue", "abort"):
            raise BadConfig(f"--on-death {survival.on_death}: known are continue, abort")
        if survival.rejoin_optimizer not in ("fresh", "peer"):
            raise BadConfig(f"--rejoin-optimizer {survival.rejoin_optimizer}: fresh or peer")
        if isinstance(most, int) and most >= ranks:
            raise BadConfig(
                f"--max-failures {most} has no effect with {ranks} ranks",
                hint="Without it a run goes on until none is left.",
            )
        if not 0 <= restarts <= MOST_RESTARTS:
            raise BadConfig(f"--restarts {restarts}: from 0 to {MOST_RESTARTS}")
        if restarts and ranks == 1:
            raise BadConfig(
                f"--restarts {restarts} has no effect with 1 rank",
                hint="Who comes back takes the model from the others. Use --save and --resume.",
            )
        if survival.rejoin_optimizer == "peer" and not restarts:
            raise BadConfig(
                "--rejoin-optimizer peer has no effect without --restarts",
                hint="Add --restarts N to let dead ranks come back.",
            )
        if survival.on_death == "abort" and (restarts or most is not None):
            given = f"--restarts {restarts}" if restarts else f"--max-failures {most:g}"
            raise BadConfig(f"{given} has no effect beside --on-death abort")

    def _check_saves(self) -> None:
        _seconds("callback_timeout", self.callback_timeout_s)
        if self.callback_timeout_s > plan.LONGEST_WAIT_S:
            raise BadConfig(
                f"--callback-timeout {self.callback_timeout_s:g}:"
                f" {plan.LONGEST_WAIT_S:g} seconds at most"
            )
        if self.save is not None and self.save.name in ("", ".."):
            raise BadConfig(
                f"--save {self.save}: there is no name in it",
                hint="STEM is how checkpoints' names begin, as ckpt/model for ckpt/model-000012.",
            )
        if self.resume is not None and not self.resume:
            raise BadConfig("--resume names nothing", hint="Give auto, a stem or a directory.")
        if self.keep is None:
            return
        if self.keep < 1:
            raise BadConfig(f"--keep {self.keep}: at least 1 checkpoint stays")
        # A script may save in ways that are not known here.
        saves = self.save or self.wishes.save_every or self.resume or not self.workload
        if not saves:
            raise BadConfig(
                f"--keep {self.keep} has no effect: nothing is saved",
                hint="Give --save or --save-every too.",
            )

    def _check_view(self) -> None:
        if self.progress not in PROGRESS_MODES:
            raise BadConfig(f"--progress {self.progress}: known are {', '.join(PROGRESS_MODES)}")
        if self.show_ranks not in SHOWN_RANKS:
            raise BadConfig(f"--show-ranks {self.show_ranks}: known are {', '.join(SHOWN_RANKS)}")
        if self.quiet and self.verbose:
            raise BadConfig("-q and -v exclude each other")


def flag(name: str) -> str:
    """The spelling on the command line of an option's name in Python."""
    return "--" + name.replace("_", "-")


def _seconds(name: str, value: float, *, zero: bool = False) -> None:
    """Refuse what is no length of time; nan and infinity too."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise BadConfig(f"{flag(name)} {value:g}: must be {least} seconds")
