"""Whole runs with a rank killed in each, compared with one process that repeats the record.

    python tests/engine/oracle_kills.py DIR [--kills N] [--seed S]

Ranks, speeds, policy, victim and moment follow from the seed. Every fifth kill falls inside a
reduce, by a failpoint; the others at any moment from a rank's birth to its end. Kills that came too
late to hit anybody are made up for. Prints a JSON line per run, and one at the end; fails at the
first run that does not end, has lost or doubled a pick, or ends elsewhere than the oracle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from faults_rig import Faults
from many_runs import fork_killer
from oracle import CLOSE, repeat
from oracle_script import EPOCHS, SAMPLES

from flodl_shm.control.options import Survival, Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.launch import conduct
from flodl_shm.engine.rank_main import preload

SCRIPT = Path(__file__).with_name("oracle_script.py")
LIMIT_S = 60.0
IN_REDUCE = ("at_publish", "after_publish", "mid_shard", "redo_valid", "after_shard", "adopt")


def config_of(place: Path, rng: random.Random) -> RunConfig:
    """A run of about a second."""
    ranks = rng.choice((2, 3, 4))
    policy = rng.choice(("cadence", "sync"))
    steps = [rng.choice((2.0, 4.0, 6.0)) for _ in range(ranks)]
    return RunConfig(
        ranks=ranks,
        devices=("cpu",) * ranks,
        script=SCRIPT,
        script_args=(str(place), *map(str, steps)),
        wishes=Wishes(
            policy=policy,
            seed=rng.randrange(1000),
            anchor=3 if policy == "cadence" else None,
        ),
        survival=Survival(restarts=rng.choice((0, 0, 1))),
        run_root=place,
        progress="none",
        quiet=True,
    )


def kill_once(place: Path, seed: str, *, in_reduce: bool) -> dict[str, Any]:
    """One run. Raises AssertionError when something is wrong with how it ends."""
    place.mkdir()
    rng = random.Random(seed)
    config = config_of(place, rng)
    victim, delay_s = rng.randrange(config.ranks), rng.uniform(0, 0.7)
    point, nth = rng.choice(IN_REDUCE), rng.randrange(2, 9)
    told = {"seed": seed, "ranks": config.ranks, "policy": config.wishes.policy, "victim": victim}
    began = time.monotonic()
    if in_reduce:
        spec = f"{point}:rank={victim}:nth={nth}:do=kill"
        faults = Faults(place / "faults", spec)
        os.environ.update(faults.env)
        try:
            outcome = conduct(config)
        finally:
            for name in faults.env:
                del os.environ[name]
        told |= {"point": point, "nth": nth, "struck": bool(faults.hits(spec))}
    else:
        killer = fork_killer(place, victim, delay_s)
        outcome = conduct(config)
        _, status = os.waitpid(killer, 0)
        told |= {"delay_s": round(delay_s, 3), "struck": status == 0}
    took_s = time.monotonic() - began
    assert took_s < LIMIT_S, f"took {took_s:.0f} s: {told}"
    return told | check(place, config.ranks, outcome, told) | {"took_s": round(took_s, 2)}


def check(place: Path, ranks: int, outcome: Any, told: dict[str, Any]) -> dict[str, Any]:
    """Deaths and the distance from the oracle."""
    said = f"{told} in {place}"
    summary = json.loads(outcome.run_dir.summary.read_text())
    assert outcome.end.exit_code == 0, f"{outcome.end}: {said}"
    assert summary["status"] == "ok", said
    assert len(summary["coverage"]) == EPOCHS, said
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] == SAMPLES, f"{epoch}: {said}"
        assert epoch["duplicated"] == epoch["missing"] == 0, f"{epoch}: {said}"
    finals = [np.load(path) for path in sorted(place.glob("final-*.npy"))]
    assert len(finals) >= summary["survivors"] - 1, said  # one may die between its end and here
    assert finals, said
    for final in finals:
        assert np.array_equal(final, finals[0]), f"survivors differ: {said}"
    oracle = repeat(outcome.run_dir.journal)
    apart = float(np.abs(oracle.params - finals[0]).max())
    assert apart <= CLOSE, f"{apart} from the oracle: {said}"
    return {"deaths": len(summary["deaths"]), "rejoins": len(summary["rejoins"]), "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(json.dumps({"seed": given.seed}), flush=True)
    preload()
    done: list[dict[str, Any]] = []
    kills = number = 0
    while kills < given.kills:
        place = given.root / str(number)
        one = kill_once(place, f"{given.seed} {number}", in_reduce=number % 5 == 4)
        print(json.dumps(one), flush=True)
        done.append(one)
        kills += one["struck"]
        number += 1
        shutil.rmtree(place)
    print(json.dumps(totals(done)), flush=True)


def totals(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all runs."""
    return {
        "runs": len(done),
        "kills": sum(one["struck"] for one in done),
        "inside": sum(one["struck"] and "point" in one for one in done),
        "deaths": sum(one["deaths"] for one in done),
        "rejoins": sum(one["rejoins"] for one in done),
        "apart": max(one["apart"] for one in done),
        "longest_s": max(one["took_s"] for one in done),
    }


if __name__ == "__main__":
    sys.exit(main())
