"""Every option of `run`, one line each: what is built first, what is not at the end.

--help lists them in this order, under their sections.
"""

from __future__ import annotations

from pathlib import Path

import click

from flodl_shm import workloads
from flodl_shm.cli.config_file import read_config
from flodl_shm.cli.options import RunOption, later, working
from flodl_shm.control.options import CALLBACK_TIMEOUT_S

RIG = "Ranks and devices"
TRAINING = "Training"
BALANCE = "Balance"
FAULTS = "Deaths and stops"
SAVES = "Checkpoints and callbacks"
OUTPUT = "Files and screen"

# Values the contract names and this version lacks, by option.
LATER_VALUES = {
    "policy": ("async",),
    "backend": ("nccl", "gloo"),
}


def _choice(*values: str, name: str = "") -> click.Choice[str]:
    return click.Choice([*values, *LATER_VALUES.get(name, ())])


OPTIONS: tuple[RunOption, ...] = (
    working(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        section=RIG,
        help="Options from a TOML file: epochs = 3. Flags and environment win over it.",
    ),
    working(
        "-m",
        "--module",
        metavar="MODULE",
        section=RIG,
        help="Run a module instead of SCRIPT, as python -m does; what follows is its own.",
    ),
    working(
        "--ranks",
        "--nproc-per-node",
        metavar="N|auto|gpu|cpu",
        section=RIG,
        help="Processes to train with. auto: one per usable GPU, else 2 on CPU.",
    ),
    working(
        "--devices",
        metavar="LIST",
        listed=True,
        section=RIG,
        help="One per rank, as cuda:0,cuda:1,cpu.",
    ),
    working(
        "--backend",
        type=_choice("shm", name="backend"),
        default="shm",
        section=RIG,
        show_default=True,
        help="How replicas meet.",
    ),
    working(
        "--start",
        type=_choice("fork", "spawn"),
        default="fork",
        section=RIG,
        show_default=True,
        help="How ranks are made: forked with torch imported once, or each a fresh interpreter.",
    ),
    working(
        "--slow",
        multiple=True,
        metavar="RANK:FACTOR[@EPOCH]",
        section=RIG,
        help="Make a rank take FACTOR times as long, from EPOCH on. Repeatable.",
    ),
    working(
        "--workload",
        metavar="NAME",
        section=RIG,
        help=f"Built-in model instead of SCRIPT: {', '.join(workloads.NAMES)}. "
        f"Without either: {workloads.DEFAULT}.",
    ),
    working(
        "--step-ms",
        listed=True,
        metavar="LIST",
        section=RIG,
        help="paced only: milliseconds a step takes, one number per rank.",
    ),
    working("--picks", type=int, section=RIG, help="paced only: samples of an epoch."),
    working(
        "--policy",
        type=_choice("sync", "cadence", name="policy"),
        section=TRAINING,
        help="When ranks agree: after every batch, or when the slowest has done its steps. "
        "[default: cadence]",
    ),
    working("--epochs", type=int, section=TRAINING, help="Passes over the data."),
    working(
        "--batch-size",
        listed=True,
        metavar="N[,N...]",
        section=TRAINING,
        help="Samples of one step, for all ranks or one for each. [default: 32]",
    ),
    working(
        "--augment",
        type=int,
        section=TRAINING,
        help="Passes of each sample in an epoch, each with a key of its own. [default: 1]",
    ),
    working("--seed", type=int, section=TRAINING, help="Of model, data order and training."),
    working(
        "--tail",
        type=_choice("drop", "keep", name="tail"),
        section=TRAINING,
        help="What becomes of samples that fill no batch. [default: drop]",
    ),
    working(
        "--eval-every",
        type=int,
        metavar="EPOCHS",
        section=TRAINING,
        help="Evaluate the consensus this often; 0: only at the end. [default: 0]",
    ),
    working("--max-grad-norm", type=float, section=TRAINING, help="Clip gradients to this norm."),
    working(
        "--anchor",
        type=int,
        section=BALANCE,
        help="Steps of the slowest rank in the first window. [default: 10]",
    ),
    working("--max-anchor", type=int, section=BALANCE, help="... and at most, as windows grow."),
    working(
        "--overhead-target",
        type=float,
        section=BALANCE,
        help="Part of the time that may go into reduces: windows grow until it holds.",
    ),
    working(
        "--max-batch-diff",
        type=int,
        metavar="N",
        section=BALANCE,
        help="Batches a rank may be ahead of another in a window; 0: lockstep.",
    ),
    working(
        "--speed-hint",
        metavar="R:X",
        section=BALANCE,
        help="A first guess: rank R is slowest, the others are X times as fast.",
    ),
    working(
        "--partition-ratios",
        listed=True,
        metavar="LIST",
        section=BALANCE,
        help="Fixed shares by rank instead of measured ones, summing to 1: 0.7,0.3.",
    ),
    working(
        "--gamma",
        type=float,
        section=BALANCE,
        help="A rank weighs its steps to this power in the mean. [default: 1]",
    ),
    working(
        "--save",
        type=click.Path(path_type=Path),
        metavar="STEM",
        section=SAVES,
        help="Checkpoints are directories STEM-<step>, also one at the end. "
        "[default: RUN_DIR/ckpt/model, not at the end]",
    ),
    working(
        "--save-every",
        type=int,
        metavar="EPOCHS",
        section=SAVES,
        help="Save this often; 0: only when somebody asks, or stops the run. [default: 0]",
    ),
    working("--keep", type=int, metavar="N", section=SAVES, help="Remove all but the newest N."),
    working(
        "--resume",
        metavar="auto|STEM",
        section=SAVES,
        help="Go on from the newest checkpoint of STEM, or a directory. auto: of --save, else of "
        "earlier runs, and start afresh where there is none.",
    ),
    working(
        "--epoch-callback-rank",
        metavar="fastest|N",
        section=SAVES,
        help="Who runs the epoch function and the evaluation, and writes the model. "
        "[default: fastest]",
    ),
    working(
        "--callback-timeout",
        type=float,
        default=CALLBACK_TIMEOUT_S,
        metavar="S",
        section=SAVES,
        help="A function of the script that lasts longer is abandoned. [default: 600]",
    ),
    working(
        "--max-failures",
        metavar="N|FRACTION",
        section=FAULTS,
        help="With more ranks missing, save and end with exit code 4. "
        "[default: until none is left]",
    ),
    working(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        section=FAULTS,
        help="Start a dead rank again, N times each; it goes on from the others' model. "
        "[default: 0]",
    ),
    working(
        "--rejoin-optimizer",
        type=_choice("fresh", "peer"),
        default="fresh",
        section=FAULTS,
        show_default=True,
        help="What a rank that comes back has for an optimizer state: none, or another rank's.",
    ),
    working(
        "--on-death",
        type=_choice("continue", "abort"),
        default="continue",
        section=FAULTS,
        show_default=True,
        help="abort: save and end with exit code 4 at the first death.",
    ),
    working(
        "--dead-after",
        type=float,
        default=5.0,
        metavar="S",
        section=FAULTS,
        help="A stopped process is dead after this long. [default: 5]",
    ),
    working(
        "--stall-timeout",
        type=float,
        default=300.0,
        metavar="S",
        section=FAULTS,
        help="So is a rank without any progress. [default: 300]",
    ),
    working(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        section=FAULTS,
        help="Time to finish and save after a first signal to stop. [default: 30]",
    ),
    working(
        "--run-dir",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        section=OUTPUT,
        show_default=True,
        help="Where run directories are made.",
    ),
    working("--name", section=OUTPUT, help="Of this run; part of its directory's name."),
    working(
        "--progress",
        type=_choice("auto", "live", "line", "json", "none", name="progress"),
        default="auto",
        section=OUTPUT,
        show_default=True,
        help="What the screen shows. auto: live on a terminal, else lines.",
    ),
    working(
        "--show-ranks",
        type=_choice("0", "all", "errors"),
        default="0",
        section=OUTPUT,
        show_default=True,
        help="Whose output the screen shows; files keep everything.",
    ),
    working(
        "--summary",
        type=click.Path(path_type=Path),
        metavar="FILE",
        section=OUTPUT,
        help="Write a copy of the run's summary.json here.",
    ),
    working("--dry-run", is_flag=True, section=OUTPUT, help="Show the settings; start nothing."),
    working(
        "--json",
        "as_json",
        is_flag=True,
        section=OUTPUT,
        help="Print the summary (or the dry run) on stdout as one object.",
    ),
    working(
        "-q", "--quiet", is_flag=True, section=OUTPUT, help="Only what went wrong and how it ended."
    ),
    working(
        "-v",
        "--verbose",
        count=True,
        section=OUTPUT,
        help="Every decision, when it changes; at the end where each rank's time went.",
    ),
    later("--lr-scale", metavar="X", does="Scale the learning rate with the world."),
    later("--max-overshoot", metavar="N", does="Batches beyond the window, under async."),
    later("--async-apply", metavar="delta|easgd", does="How an async rank takes the mean."),
    later("--easgd-alpha", metavar="X", does="Strength of the pull under easgd."),
    later("--outer", metavar="none|slowmo|diloco[:lr,mu]", neutral="none", does="Outer optimizer."),
    later("--guard", metavar="trend|msf|none", neutral="trend", does="Convergence guard."),
    later("--lr-control", metavar="on|off", neutral="off", does="Learning-rate meta-controller."),
    later("--arena-dtype", metavar="f32|bf16", neutral="f32", does="Of parameters in the arena."),
    later("--trace", metavar="FILE", does="A trace of the run."),
    later("--serve", metavar="[HOST:]PORT", does="A page about the run."),
)
