"""summary.json: a finished run in one object, with exactly the keys the README documents.

Seconds and milliseconds as floats, absent figures as null. Every number comes from the tally, or
from samples of what the ranks used; this module only names and rounds them.
"""

from __future__ import annotations

import math
import platform
from importlib import metadata
from typing import TYPE_CHECKING

from flodl_shm.obs.profile import profile
from flodl_shm.obs.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.ids import Nanos, Rank
    from flodl_shm.obs.resources import RankUse
    from flodl_shm.obs.tally import Death, Rejoin, Tally

SCHEMA = 1
DISTRIBUTIONS = ("flodl_shm", "torch", "numpy", "msgspec")


def summary(tally: Tally, *, now: Nanos, resources: Resources | None = None) -> dict[str, object]:
    """The object to write at the end of the run, or at any earlier moment."""
    used = resources or Resources()
    plan, facts, first = tally.plan, tally.facts, tally.first_step_at
    efficiency = tally.efficiency()
    return {
        "schema": SCHEMA,
        "status": tally.end.status if tally.end else "failed",
        "workload": facts.workload,
        "policy": plan.policy if plan else None,
        "backend": facts.backend,
        "world_size": facts.world_size,
        "survivors": len(tally.survivors),
        "epochs": plan.epochs if plan else None,
        "seed": plan.seed if plan else None,
        "wall_s": _seconds(now - facts.started_at),
        "startup_s": None if first is None else _seconds(first - facts.started_at),
        "train_s": _seconds(tally.train_ns),
        "picks_total": tally.picks,
        "picks_per_s": _rounded(tally.picks_per_s, 3),
        "reduces": len(tally.reduces_ns),
        "reduce_ms": {
            "p50": _millis(percentile(tally.reduces_ns, 50)),
            "p99": _millis(percentile(tally.reduces_ns, 99)),
            "total": _millis(sum(tally.reduces_ns)),
        },
        "loss": [epoch.loss for epoch in tally.epochs],
        "eval": [{"epoch": epoch, "value": value} for epoch, value in tally.evals],
        "coverage": _coverage(tally),
        "deaths": [_death(death, facts.started_at) for death in tally.deaths],
        "rejoins": [_rejoin(back, facts.started_at) for back in tally.rejoins],
        "efficiency": {
            "he": _rounded(efficiency.he, 4),
            "vs_fastest": _rounded(efficiency.vs_fastest, 4),
            "sync_bound": _rounded(efficiency.sync_bound, 4),
            "waste": {name: round(part, 4) for name, part in efficiency.waste.items()},
        },
        "per_rank": [_rank(tally, number, used.ranks[number]) for number in tally.ranks],
        "params_sha256": tally.params_sha256(),
        "versions": versions(),
    }


def percentile(values: Sequence[int], percent: int) -> int | None:
    """The smallest value that at least `percent` % of them do not exceed; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def versions() -> dict[str, str]:
    """What is installed, read from metadata: asking torch itself would import it."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # a source tree on sys.path has no metadata
    return found


def _coverage(tally: Tally) -> list[dict[str, int]]:
    return [
        {
            "epoch": epoch.epoch,
            "picks": epoch.picks,
            "done_once": epoch.done_once,
            "duplicated": epoch.duplicated,
            "missing": epoch.missing,
            "dropped": epoch.dropped,
        }
        for epoch in tally.epochs
    ]


def _death(death: Death, started_at: Nanos) -> dict[str, object]:
    known = death.last_sign_at > 0
    after = None if death.committed_at is None else death.committed_at - death.at
    return {
        "rank": death.rank,
        "incarnation": death.incarnation,
        "cause": death.cause,
        "at_s": _seconds(death.at - started_at),
        "detected_ms": _millis(death.at - death.last_sign_at) if known else None,
        "next_commit_ms": _millis(after),
    }


def _rejoin(back: Rejoin, started_at: Nanos) -> dict[str, object]:
    after = None if back.committed_at is None else back.committed_at - back.at
    return {
        "rank": back.rank,
        "incarnation": back.incarnation,
        "at_s": _seconds(back.at - started_at),
        "committed_ms": _millis(after),
    }


def _rank(tally: Tally, number: Rank, use: RankUse) -> dict[str, object]:
    """What a rank said of its memory at its end; of one that said nothing, what was seen last."""
    rank, last = tally.ranks[number], tally.ranks[number].finished
    rss_mib = last.rss_mib if last else use.rss_mib
    seen = [mib for mib in (rss_mib, use.rss_peak_mib) if mib is not None]
    return {
        "rank": number,
        "device": rank.device,
        "batches": rank.batches,
        "picks": rank.committed,
        "share": round(tally.share(number), 4),
        "busy_s": _seconds(rank.busy_ns),
        "wait_s": _seconds(rank.wait_ns + rank.barrier_ns),
        "data_s": _seconds(rank.data_ns),
        "reduce_s": _seconds(rank.reduce_ns),
        "picks_per_busy_s": _rounded(rank.rate, 3),
        "rss_mib": _rounded(rss_mib, 1),
        "pss_mib": _rounded(last.pss_mib if last else use.pss_mib, 1),
        "exit": rank.exit,
        "rss_peak_mib": _rounded(max(seen, default=None), 1),
        "private_mib": _rounded(use.private_mib, 1),
        "cpu_share": _rounded(use.cpu_share, 3),
        "profile": profile(rank),
        "refused": rank.refused,
    }


def _seconds(nanos: int) -> float:
    return round(nanos / 1e9, 6)


def _millis(nanos: int | None) -> float | None:
    return None if nanos is None else round(nanos / 1e6, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
