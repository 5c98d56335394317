"""`flodl-shm selftest`: prove on this machine what matters most, in a few seconds.

A real run of two CPU ranks, one of which is killed and comes back. Everything that is checked is
read from what the run has left: summary, journal, processes, shared memory.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from flodl_shm.errors import HostUnfit, WeBroke

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flodl_shm.engine.config import RunConfig
    from flodl_shm.engine.launch import Outcome

RANKS = 2
EPOCHS, PICKS = 3, 250  # of 300 a second: time enough to be killed and to come back
STEP_MS = (5.0, 10.0)
AFTERWARDS_S = 2.0  # nothing of a run is there so long after its end
MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and what was seen."""

    name: str
    ok: bool
    text: str


@click.command(short_help="Prove on this machine what the project promises.")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def selftest(as_json: bool) -> int:
    """Train on two CPU ranks for a few seconds, kill one, see it come back, and check.

    Exit 0 if everything holds, 3 if this machine lacks something, 70 if a promise is broken.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flodl-selftest-") as folder:
        checks = []
        for check in examine(Path(folder)):
            checks.append(check)
            if not as_json:
                click.echo(f"{'ok    ' if check.ok else 'FAILED'}  {check.name}: {check.text}")
    took_s = time.monotonic() - began
    failed = [check.name for check in checks if not check.ok]
    if as_json:
        told = [{"name": one.name, "ok": one.ok, "text": one.text} for one in checks]
        body = {"schema": 1, "ok": not failed, "took_s": round(took_s, 3), "checks": told}
        click.echo(msgspec.json.encode(body))
    else:
        click.echo(f"{len(checks) - len(failed)} of {len(checks)} hold, {took_s:.1f} s")
    return WeBroke.exit_code if failed else 0


def examine(root: Path) -> Iterator[Check]:
    """Run it under `root` and check. Raises HostUnfit where it cannot run on this machine."""
    from flodl_shm.bench.striker import Blow, blows_of, fork_striker, reap
    from flodl_shm.engine.launch import conduct
    from flodl_shm.ids import Rank
    from flodl_shm.proc.signals import die_of

    blow = Blow("kill", commits=3, rank=Rank(1))
    striker = fork_striker(root, (blow,), ranks=RANKS, seed="selftest")
    try:
        outcome = conduct(config_of(root))
    finally:
        reap(striker)
    if outcome.stopped_by:
        die_of(signal.Signals(outcome.stopped_by))
    if outcome.end.exit_code == HostUnfit.exit_code:
        raise HostUnfit(outcome.end.reason)
    summary = msgspec.json.decode(outcome.run_dir.summary.read_bytes())
    yield ended(outcome, summary)
    yield killed(summary, len(blows_of(root)))
    yield came_back(summary)
    yield covered(summary)
    yield equal_at_the_end(summary)
    yield equal_in_each_round(outcome.run_dir.journal)
    yield no_memory_left()
    yield no_process_left(outcome.run_dir.run_id)


def config_of(root: Path) -> RunConfig:
    """The run: a tiny model on two paced ranks, as unequal as 1 : 2."""
    from flodl_shm.control.options import Survival, Wishes
    from flodl_shm.engine.config import RunConfig

    return RunConfig(
        ranks=RANKS,
        devices=("cpu",) * RANKS,
        workload="paced",
        workload_options={"step_ms": STEP_MS, "picks": PICKS},
        wishes=Wishes(policy="cadence", epochs=EPOCHS, batch_size=1),
        survival=Survival(restarts=1),
        run_root=root,
        progress="none",
        quiet=True,
    )


# ---- what is checked ---------------------------------------------------------------------------


def ended(outcome: Outcome, summary: Mapping[str, Any]) -> Check:
    """The run is done, whatever was done to it."""
    ok = outcome.end.exit_code == 0 and summary["status"] == "ok"
    return Check("run", ok, outcome.end.reason)


def killed(summary: Mapping[str, Any], blows: int) -> Check:
    """The kill was noticed: once, and soon."""
    deaths = summary["deaths"]
    if blows != 1 or len(deaths) != 1:
        return Check("death", False, f"{blows} kills, {len(deaths)} deaths were told")
    (death,) = deaths
    next_ms = death["next_commit_ms"]
    text = f"rank {death['rank']} was lost to {death['cause']}"
    after = "there was no commit after it" if next_ms is None else f"next commit {next_ms:.0f} ms"
    return Check("death", next_ms is not None, f"{text}; {after}")


def came_back(summary: Mapping[str, Any]) -> Check:
    """The rank was started again and its work is in the common model."""
    back = [one for one in summary["rejoins"] if one["committed_ms"] is not None]
    if len(back) != 1:
        return Check("rejoin", False, f"{len(summary['rejoins'])} returns, {len(back)} contributed")
    (one,) = back
    text = f"rank {one['rank']} came back and contributed {one['committed_ms']:.0f} ms later"
    return Check("rejoin", True, text)


def covered(summary: Mapping[str, Any]) -> Check:
    """Each pick of each epoch is in the consensus exactly once."""
    epochs = summary["coverage"]
    ok = len(epochs) == EPOCHS and all(
        one["done_once"] == one["picks"] == PICKS and not one["duplicated"] and not one["missing"]
        for one in epochs
    )
    done = sum(one["done_once"] for one in epochs)
    return Check("coverage", ok, f"{done} of {EPOCHS * PICKS} picks trained exactly once")


def equal_at_the_end(summary: Mapping[str, Any]) -> Check:
    """All ranks end with the same parameters."""
    found, ranks = summary["params_sha256"], summary["survivors"]
    if found is None or ranks != RANKS:
        return Check("end", False, f"{ranks} of {RANKS} ranks at the end, parameters {found}")
    return Check("end", True, f"all {ranks} ranks hold the same parameters, sha256 {found[:12]}")


def equal_in_each_round(journal_path: Path) -> Check:
    """After each reduce the ranks that were in it hold the same."""
    from flodl_shm.control.messages import Left
    from flodl_shm.obs import journal

    told: dict[int, set[int]] = {}
    for record in journal.read(journal_path, only=(Left,)):
        left = getattr(record, "message", None)
        if isinstance(left, Left) and left.digest is not None:
            told.setdefault(left.round, set()).add(left.digest)
    odd = [number for number, digests in told.items() if len(digests) > 1]
    text = f"the checksums of {len(told)} rounds agree"
    if odd:
        text = f"ranks differ after rounds {odd[:MOST_SHOWN]}"
    return Check("rounds", bool(told) and not odd, text)


def no_memory_left() -> Check:
    """What the janitor finds now, nobody holds: the run's start had swept before."""
    from flodl_shm.shm import janitor

    names = janitor.sweep()
    text = f"left in /dev/shm: {', '.join(names)}" if names else "nothing is left in /dev/shm"
    return Check("memory", not names, text)


def no_process_left(run_id: str) -> Check:
    """No process has the run's name in its environment, soon after the end at the latest."""
    deadline = time.monotonic() + AFTERWARDS_S
    while (left := processes_of(run_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    text = f"still there: {left[:MOST_SHOWN]}" if left else "no process is left"
    return Check("processes", not left, text)


def processes_of(run_id: str) -> list[int]:
    """Living ones of ours whose environment names the run."""
    mark, found = f"FLODL_RUN_ID={run_id}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or another user's
    return found
