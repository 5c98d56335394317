"""bench-start: from the command to the first optimizer step of all ranks, against torchrun + DDP.

The same script under both, in turns, in an order drawn per repeat, on one clock: read here before
the process is started, by every rank after its first step. Everything a user waits for is inside,
the interpreter's start too. `startup_s` is what the summaries of the same runs say, who begin to
count in the launcher. Torch is imported once before, for the page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_shm.bench.report import conclude
from flodl_shm.errors import HostUnfit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT = Path(__file__).with_name("start_script.py")
LIMIT_S = 120.0  # a start that takes longer hangs
SHOWN_CHARS = 2000  # of what a failed start printed


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    ranks: tuple[int, ...]
    repeats: int


QUICK = Effort(ranks=(4,), repeats=3)
FULL = Effort(ranks=(2, 4), repeats=7)


@dataclass(frozen=True, slots=True)
class Start:
    """One repeat, in seconds."""

    ours_s: float
    torchrun_s: float
    startup_s: float  # of ours, by its own account


def our_command(ranks: int, script: Path) -> list[str]:
    """The engine, silent, all of its files next to the script."""
    place = script.parent
    return [
        *(sys.executable, "-m", "flodl_shm.run", "--ranks", str(ranks), "--devices", _cpus(ranks)),
        *("--progress", "none", "--run-dir", str(place / "runs")),
        *("--summary", str(place / "summary.json"), str(script), "ours"),
    ]


def torchrun_command(ranks: int, script: Path, port: int) -> list[str]:
    """torchrun on the loopback alone."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"),
        *("--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), str(script)),
        "torchrun",
    ]


def _cpus(ranks: int) -> str:
    return ",".join(["cpu"] * ranks)


def time_ours(ranks: int) -> tuple[float, float]:
    """Seconds to the first step, as seen from here and as the summary says."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        script = Path(shutil.copy(SCRIPT, Path(folder) / "train.py"))
        taken, code, printed = _time(our_command(ranks, script), script.parent, ranks)
        if code:
            raise HostUnfit(f"our start ended with exit code {code}:\n{printed}")
        told = json.loads((script.parent / "summary.json").read_text())
        return taken, float(told["startup_s"])


def time_torchrun(ranks: int) -> float:
    """Seconds to the first step. How it ends is not asked: DDP sometimes aborts on its way out."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        script = Path(shutil.copy(SCRIPT, Path(folder) / "train.py"))
        command = torchrun_command(ranks, script, _free_port())
        return _time(command, script.parent, ranks)[0]


def _time(command: Sequence[str], place: Path, ranks: int) -> tuple[float, int, str]:
    """Run it to its end: seconds to the last stamp, exit code, what it printed."""
    began = time.monotonic_ns()
    process = subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", *command],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # both launchers end their ranks on it
        printed, _ = process.communicate()
        raise HostUnfit(f"no end after {LIMIT_S:g} s:\n{printed[-SHOWN_CHARS:]}") from None
    stamps = [int(path.read_text()) for path in place.glob("stamp-*")]
    if len(stamps) != ranks:
        told = printed[-SHOWN_CHARS:]
        raise HostUnfit(f"{len(stamps)} of {ranks} ranks made a step: {command}\n{told}")
    return (max(stamps) - began) / 1e9, process.returncode, printed[-SHOWN_CHARS:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_row(ranks: int, repeats: int, *, seed: int) -> dict[str, object]:
    """Measure one number of ranks. Raises HostUnfit when a start fails or hangs."""
    draw = random.Random(seed)
    return row_of(ranks, [_start(ranks, ours_first=draw.random() < 0.5) for _ in range(repeats)])


def _start(ranks: int, *, ours_first: bool) -> Start:
    theirs = 0.0 if ours_first else time_torchrun(ranks)
    ours, told = time_ours(ranks)
    if ours_first:
        theirs = time_torchrun(ranks)
    return Start(ours_s=ours, torchrun_s=theirs, startup_s=told)


def row_of(ranks: int, starts: Sequence[Start]) -> dict[str, object]:
    """Medians; the ratio is the median of the repeats' ratios."""
    return {
        "ranks": ranks,
        "ours_s": statistics.median(start.ours_s for start in starts),
        "torchrun_s": statistics.median(start.torchrun_s for start in starts),
        "ratio": statistics.median(start.ours_s / start.torchrun_s for start in starts),
        "startup_s": statistics.median(start.startup_s for start in starts),
    }


def line_of(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    return "{ranks:5d} {ours_s:8.2f} {torchrun_s:11.2f} {ratio:6.2f} {startup_s:10.2f}".format(
        **row
    )


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-start", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="4 ranks, few repeats")
    parser.add_argument("--seed", type=int, default=0, help="of who starts first")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    return conclude(lambda: measure_all(effort, options.seed), options.json)


def measure_all(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """One row after the other; prints as it goes."""
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True)
    rows = []
    print("ranks   ours s  torchrun s  ratio  startup s")
    for ranks in effort.ranks:
        rows.append(run_row(ranks, effort.repeats, seed=seed))
        print(line_of(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
