"""Replicas that are not finite, at random, in whole simulated runs."""

from __future__ import annotations

import pytest

from flodl_shm.control.messages import Committed, Kill, Note
from flodl_shm.control.options import Wishes
from flodl_shm.sim.rig import Errands, Rig, SimRank
from flodl_shm.sim.world import World

SEEDS = range(40)


def play(seed: int, refuses: float, *, ranks: int = 3, policy: str = "cadence") -> World:
    """The world holds coverage, masses and the end against its own books."""
    rig = Rig(
        ranks=tuple(SimRank(rank, 20.0 + 15 * rank) for rank in range(ranks)),
        errands=Errands(refuses=refuses),
    )
    wishes = Wishes(policy=policy, epochs=2, batch_size=2, anchor=3, max_anchor=4)
    world = World(rig, wishes=wishes, samples=120, seed=seed)
    world.run()
    return world


def alerts(world: World, word: str) -> list[str]:
    notes = world.record.of(Note)
    return [n.text for n in notes if n.topic == "numbers" and n.alert and word in n.text]


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_coverage_is_exact_and_masses_are_right_whoever_is_refused(policy: str) -> None:
    worlds = [play(seed, 0.1, policy=policy) for seed in SEEDS]
    refused = sum(len(alerts(world, "is refused")) for world in worlds)
    assert refused > 100
    ok = [w for w in worlds if w.record.end is not None and w.record.end.status == "ok"]
    assert len(ok) > len(worlds) // 2
    zero = [
        c
        for w in ok
        for c in w.record.of(Committed)
        if any(c.picks[rank] and not c.mass[rank] for rank in c.picks)
    ]
    assert zero, "no round has committed without one of its windows"


def test_three_refusals_in_a_row_cost_the_rank_and_never_the_last_one() -> None:
    worlds = [play(seed, 0.5) for seed in SEEDS]
    kills = [world.record.of(Kill) for world in worlds]
    assert any(kills)
    assert all(len(one) < 3 for one in kills)
    for world, dropped in zip(worlds, kills, strict=True):
        assert len({kill.rank for kill in dropped}) == len(dropped)
        assert len(alerts(world, "is dropped")) == len(dropped)
        for kill in dropped:
            assert "3 rounds in a row" in kill.reason


def test_nobody_finite_ends_the_run_as_failed() -> None:
    ends = [play(seed, 1.0, ranks=2).record.end for seed in range(5)]
    for end in ends:
        assert end is not None
        assert (end.status, end.exit_code) == ("failed", 1)
        assert end.reason.startswith("the training has diverged: after round 2 no rank's")
        assert "max_grad_norm" in end.reason
