"""`flodl-shm status`: how a run stands, under way or ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from flodl_shm.obs.run_dir import find_run, last_of
from flodl_shm.obs.words import clip, duration, fraction, number, percent, rate
from flodl_shm.proc.procfs import descends

if TYPE_CHECKING:
    from flodl_shm.ids import Rank
    from flodl_shm.obs.run_state import RunState

SHOWN_CAUSE = 120  # characters


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    envvar="FLODL_RUN_DIR",
    help="Where run directories are; the newest is shown.",
)
@click.argument("path", metavar="[RUN_DIR]", required=False, type=click.Path(path_type=Path))
def status(as_json: bool, run_dir: Path, path: Path | None) -> int:
    """Show how a run stands. Reads its files and disturbs nothing.

    RUN_DIR is one run, or a directory of runs. Of a script with several the last is shown.
    """
    from flodl_shm.obs.run_state import read_state  # --help needs none of it

    state = read_state(last_of(find_run(path or run_dir)))
    told = as_object(state, now=time.monotonic_ns())
    click.echo(msgspec.json.encode(told) if as_json else "\n".join(lines(told)))
    return 0


def as_object(state: RunState, *, now: int) -> dict[str, Any]:
    """Everything for --json. `now` is the clock of the journal, read on this machine."""
    tally, commit = state.tally, state.tally.last_commit
    running = state.writer is not None
    started, rate, planned = state.header.started_at, state.picks_per_s, state.picks_planned
    wall_s = (now - started) / 1e9 if running else state.summary.get("wall_s")
    ranks = [_rank(state, rank) for rank in tally.ranks]
    return {
        "schema": 1,
        "run_id": state.header.run_id,
        "run_dir": str(state.path),
        "state": state.word,
        "reason": tally.end.reason if tally.end else None,
        "title": tally.facts.workload,
        "started": state.header.started,
        "launcher_pid": state.writer or None,
        "wall_s": _rounded(wall_s, 3),
        "epoch": commit.epoch if commit else None,
        "epochs": tally.plan.epochs if tally.plan else None,
        "reduce": commit.round if commit else None,
        "loss": commit.loss if commit else None,
        "picks": tally.picks,
        "picks_planned": planned or None,
        "progress": round(tally.picks / planned, 4) if planned else None,
        "picks_per_s": _rounded(rate, 3),
        "left_s": _rounded((planned - tally.picks) / rate, 1) if running and rate else None,
        "he": state.figures.get("he"),
        "last_commit_age_s": _age_s(state, now) if running else None,
        "ranks_alive": None if state.writer == 0 else sum(rank["alive"] for rank in ranks),
        "ranks": ranks,
        "deaths": [
            {
                "rank": death.rank,
                "incarnation": death.incarnation,
                "cause": death.cause,
                "at_s": round((death.at - started) / 1e9, 3),
            }
            for death in tally.deaths
        ],
    }


def _age_s(state: RunState, now: int) -> float | None:
    at = state.tally.last_commit_at
    return None if at is None else round((now - at) / 1e9, 3)


def _rank(state: RunState, number_: Rank) -> dict[str, Any]:
    rank, sample = state.tally.ranks[number_], state.samples.get(number_, {})
    pid, incarnation = state.pids.get(number_, (None, None))
    # A number alone says little: it may be another process's by now. A rank descends from the
    # launcher, and that one is known by its lock.
    alive = bool(state.writer and pid) and descends(pid or 0, state.writer or 0)
    if rank.is_dead:
        word = "lost"
    elif rank.finished is not None:
        word = "done"
    elif state.writer == 0:
        word = "unknown"
    else:
        word = "alive" if alive else "gone"
    fresh = sample if sample.get("pid") == pid else {}
    return {
        "rank": number_,
        "device": rank.device,
        "state": word,
        "alive": alive,
        "pid": pid,
        "incarnation": incarnation,
        "picks": rank.committed,
        "share": round(state.tally.share(number_), 4),
        "cpu": fresh.get("cpu"),
        "rss_mib": fresh.get("rss_mib"),
    }


def lines(told: dict[str, Any]) -> list[str]:
    """The object of `as_object` for people."""
    rows = [f"{told['run_id']}  {told['title']}  {_standing(told)}"]
    if told["epoch"] is None:
        rows.append("  nothing is trained yet")
    else:
        rows.append(f"  {_progress(told)}")
    rows += [_row(rank) for rank in told["ranks"]]
    for death in told["deaths"]:
        cause = clip(death["cause"], SHOWN_CAUSE)
        rows.append(f"  rank {death['rank']} was lost at {death['at_s']:.1f} s: {cause}")
    rows.append(f"  files  {told['run_dir']}")
    return rows


def _standing(told: dict[str, Any]) -> str:
    lasted = "" if told["wall_s"] is None else f" {duration(told['wall_s'])}"
    if told["state"] == "running":
        who = f", launcher {told['launcher_pid']}" if told["launcher_pid"] else ""
        return f"running for{lasted}{who}"
    if told["state"] == "killed":
        return "killed: no launcher, and no summary was written"
    why = f": {clip(told['reason'])}" if told["reason"] and told["state"] != "ok" else ""
    return f"{told['state']} after{lasted}{why}"


def _progress(told: dict[str, Any]) -> str:
    parts = [f"epoch {told['epoch']} (last: {told['epochs'] - 1})", f"reduce {told['reduce']}"]
    if told["progress"] is not None:
        parts.append(f"{told['picks']} of {told['picks_planned']} picks")
        parts.append(percent(told["progress"]))
    parts.append(f"{rate(told['picks_per_s'])} picks/s")
    if told["loss"] is not None:
        parts.append(f"loss {number(told['loss'])}")
    if told["he"] is not None:
        parts.append(f"he {fraction(told['he'])}")
    if told["last_commit_age_s"] is not None:
        parts.append(f"last commit {duration(told['last_commit_age_s'])} ago")
    if told["left_s"] is not None:
        parts.append(f"about {duration(told['left_s'])} left")
    return "  ".join(parts)


def _row(rank: dict[str, Any]) -> str:
    parts = [
        f"rank {rank['rank']}",
        rank["state"],
        rank["device"],
        f"share {percent(rank['share'])}",
    ]
    if rank["alive"]:
        parts.append(f"pid {rank['pid']}")
        if rank["cpu"] is not None:
            parts.append(f"cpu {percent(rank['cpu'])}")
        if rank["rss_mib"] is not None:
            parts.append(f"rss {rank['rss_mib']:.0f} MiB")
    return "  " + "  ".join(parts)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
