"""The kill tests for as long as one likes: `scripts/soak --seconds N --seed S`.

Every trial follows from the seed, its number and its rig; a failed one is printed with them. The
machine's timing is not in the seed, so a failure may need several tries to come back.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from reduce_faults import Die
from reduce_plans import BLOCK_POINTS, MEETING, fuzz_faults, random_kills
from reduce_rig import ROUNDS, Rig

SHAPES = (
    {"ranks": 2},
    {"ranks": 3},
    {"ranks": 4},
    {"ranks": 3, "slots": (0, 1, 3)},
    {"ranks": 3, "joiner": 0},
    {"ranks": 4, "joiner": 3},
    {"ranks": 2, "params": 1_500_000, "buffers": 70_000, "sample": 16},
)


def cascade(rig, rng):
    """Injected deaths: an owner at a point, then helpers at later blocks of its shard."""
    ranks = [rank for rank in range(rig.ranks) if rank != rig.joiner]
    victim, number = rng.choice(ranks), rng.randrange(1, ROUNDS)
    last = max(1, rig.grid.blocks // rig.ranks)
    blocks = sorted(rng.sample(range(last), min(last, rng.randint(1, rig.ranks - 1))))
    inside = rng.random() < 0.8
    point = rng.choice(BLOCK_POINTS if inside else MEETING)
    faults = {victim: Die(point, victim, blocks[0] if inside else None, at_round=number)}
    helpers = [rank for rank in range(rig.ranks) if rank != victim]
    for helper, block in zip(helpers, blocks[1:], strict=False):
        faults[helper] = Die(rng.choice(BLOCK_POINTS), victim, block, at_round=number)
    return faults


def one_trial(rig, rng):
    """(kind, report) of one trial of a kind that the generator draws."""
    kind = rng.choice(("injected", "random", "fuzz"))
    if kind == "injected":
        return kind, rig.trial(cascade(rig, rng))
    if kind == "random":
        return kind, rig.trial(kills=random_kills(rig, rng))
    return kind, rig.trial(fuzz_faults(rig, rng), kills=random_kills(rig, rng)[1:])


def soak(seconds, seed):
    """Run trials until the time is over; the number of failed ones."""
    rigs = [Rig(**shape) for shape in SHAPES]
    trials, deaths, failed = Counter(), Counter(), 0
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            number = trials.total()
            shape = number % len(rigs)
            kind, report = one_trial(rigs[shape], random.Random(f"{seed} {number}"))
            trials[kind] += 1
            deaths[kind] += len(report.dead)
            if report.bad:
                failed += 1
                print(f"FAILED seed {seed} trial {number} {kind} {SHAPES[shape]}: {report.bad}")
    finally:
        for rig in rigs:
            rig.close()
    print(f"seed {seed}: {trials.total()} trials, {deaths.total()} deaths, {failed} failed")
    print(", ".join(f"{kind}: {trials[kind]} trials, {deaths[kind]} deaths" for kind in trials))
    if not deaths["injected"] or not deaths["random"] or not deaths["fuzz"]:
        print("a kind of kill killed nobody: the soak proves nothing")
        failed += 1
    return failed


def main(argv=None):
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    return 1 if soak(options.seconds, seed) else 0


if __name__ == "__main__":
    sys.exit(main())
