"""Where a rank's time went, from its first step to its last reduce, for the end of a run.

run       all of it, evaluations of other ranks included
compute   timed steps                       data       waiting for samples
dispatch  from a consensus to the grant     barrier    from arrival to the last one's arrival
reduce    from then to the consensus        callback   user callbacks and evaluations
other     what nobody measured: messages, bookkeeping, a rank waiting for an evaluation
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flodl_shm.obs.words import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.obs.rank_tally import RankTally

PARTS = ("compute", "data", "barrier", "dispatch", "reduce", "callback", "other")


def profile(rank: RankTally) -> dict[str, Any]:
    """Seconds and counts of one rank, all its incarnations together."""
    began, ended = rank.first_step_at, rank.last_left_at
    run_ns = 0 if began is None else rank.lived_ns(began, ended)
    parts = {
        "compute": rank.busy_ns,
        "data": rank.data_ns,
        "barrier": rank.barrier_ns,
        "dispatch": rank.wait_ns,
        "reduce": rank.reduce_ns,
        "callback": rank.callback_ns,
    }
    parts["other"] = max(0, run_ns - sum(parts.values()))
    return {
        "run_s": _seconds(run_ns),
        **{f"{name}_s": _seconds(ns) for name, ns in parts.items()},
        "windows": rank.windows,
        "reports": rank.reports,
        "orders": rank.orders,
    }


def profile_lines(per_rank: list[Mapping[str, Any]]) -> list[str]:
    """The `per_rank` of a summary for people: two lines a rank."""
    lines = []
    for rank in per_rank:
        told = rank["profile"]
        run_s = told["run_s"]
        parts = "  ".join(
            f"{name} {100 * told[f'{name}_s'] / run_s:.1f}%" for name in PARTS if run_s
        )
        lines.append(f"  rank {rank['rank']}  run {duration(run_s)}  {parts}".rstrip())
        lines.append(
            f"          {told['windows']} windows, {told['reports']} reports, "
            f"{told['orders']} orders   {_memory(rank)}".rstrip()
        )
    return lines


def _memory(rank: Mapping[str, Any]) -> str:
    words = {
        "rss_mib": "rss",
        "rss_peak_mib": "peak",
        "pss_mib": "pss",
        "private_mib": "private",
    }
    told = [f"{word} {rank[key]:.0f}" for key, word in words.items() if rank[key] is not None]
    cpu = "" if rank["cpu_share"] is None else f"   cpu {100 * rank['cpu_share']:.0f}%"
    return f"{' '.join(told)} MiB{cpu}" if told else cpu.strip()


def _seconds(nanos: int) -> float:
    return round(nanos / 1e9, 6)
