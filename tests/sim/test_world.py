"""Whole runs in memory: the real coordinator against simulated ranks, by thousands of seeds."""

from __future__ import annotations

import random

import msgspec
import pytest

from flodl_shm.control.messages import Committed, Note, Publish
from flodl_shm.control.options import Survival, Wishes
from flodl_shm.sim.rig import DEATH_POINTS, MS, Death, Rig, SimRank, random_rig
from flodl_shm.sim.world import World

CHUNK = 100


def play(seed: int) -> World:
    rng = random.Random(seed)
    rig = random_rig(rng)
    size = len(rig.ranks)
    sizes = rng.choice(((1,), (1,), (4,), tuple(rng.choice((1, 2, 3, 8)) for _ in range(size))))
    samples = max(sizes) * rng.randint(size, 120) + rng.randrange(max(sizes))
    wishes = random_wishes(rng, size, sizes)
    if goes_on(seed):
        wishes = msgspec.structs.replace(wishes, can_save=True)
    world = World(rig, wishes=wishes, samples=samples, seed=seed, callbacks=random_callbacks(rng))
    world.run()
    return world


def goes_on(seed: int) -> bool:
    """Whether a run of that seed is resumed too: not all of them, for the time it takes."""
    return seed % 4 == 3


def random_wishes(rng: random.Random, size: int, sizes: tuple[int, ...]) -> Wishes:
    parts = [rng.uniform(0.2, 1) for _ in range(size)]
    return Wishes(
        policy=rng.choice(("sync", "cadence", "cadence", "cadence")),
        epochs=rng.randint(1, 3),
        batch_size=sizes if len(sizes) > 1 else sizes[0],
        tail=rng.choice(("drop", "keep")),
        augment=rng.choice((1, 1, 3)),
        anchor=rng.choice((1, 2, 10)),
        partition_ratios=tuple(p / sum(parts) for p in parts) if rng.random() < 0.1 else None,
        max_batch_diff=rng.choice((None, None, None, 0, 3)),
        eval_every=rng.choice((0, 0, 1)),
        can_save=rng.random() < 0.6,
        save_every=rng.choice((0, 1, 2)),
        save_at_end=rng.random() < 0.5,
        epoch_callback_rank=rng.choice(("fastest", "fastest", str(rng.randrange(size)))),
        callback_timeout_s=rng.choice((5.0, 600.0)),
        survival=random_survival(rng, size),
    )


def random_survival(rng: random.Random, size: int) -> Survival:
    return Survival(
        max_failures=rng.choice((None, None, None, rng.randrange(size), 0.5)),
        on_death=rng.choice(("continue",) * 9 + ("abort",)),
        restarts=rng.choice((0, 1, 2, 5)),
        rejoin_optimizer=rng.choice(("fresh", "peer")),
        grace_s=rng.choice((0.0, 0.5, 30.0)),
    )


def random_callbacks(rng: random.Random) -> tuple[str, ...]:
    return tuple(
        name for name in ("epoch", "checkpoint", "evaluation", "metrics") if rng.random() < 0.6
    )


def play_on(seed: int) -> World | None:
    """Resume from any checkpoint of that seed's run, maybe in another world; None without one."""
    first = play(seed)
    published = first.record.of(Publish)
    if not published:
        return None
    rng = random.Random(-seed - 1)
    start = first.restart(rng.choice(published))
    rig = random_rig(rng) if rng.random() < 0.5 else first.rig
    size = len(rig.ranks)
    batch = rng.choice((start.meta.batch_sizes[0], 1, 3))
    picks = start.meta.samples * start.meta.augment
    wishes = msgspec.structs.replace(
        random_wishes(rng, size, (batch if batch * size <= picks else 1,)),
        augment=start.meta.augment,
        epochs=max(start.meta.epochs, rng.randint(1, 4)),
    )
    if size > picks:
        return None
    world = World(
        rig,
        wishes=wishes,
        samples=start.meta.samples,
        seed=seed,
        callbacks=random_callbacks(rng),
        start=start,
    )
    world.run()
    return world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        total = metafunc.config.getoption("sim_seeds")
        metafunc.parametrize("first_seed", range(0, total, CHUNK))


def test_every_promise_holds_on_any_rig(first_seed: int, request: pytest.FixtureRequest) -> None:
    last = min(first_seed + CHUNK, request.config.getoption("sim_seeds"))
    for seed in range(first_seed, last):
        try:
            play_on(seed) if goes_on(seed) else play(seed)
        except Exception as error:
            pytest.fail(f"replay with: pytest {__file__} --sim-seed {seed}: {error!r}")


def test_a_named_seed_replays(request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("sim_seed")
    play_on(7 if seed is None else seed)


@pytest.mark.parametrize("seed", range(30))
def test_same_seed_gives_the_same_actions(seed: int) -> None:
    assert play(seed).record.actions == play(seed).record.actions


def rig_of(*ms: float, **more: object) -> Rig:
    return Rig(ranks=tuple(SimRank(rank, m) for rank, m in enumerate(ms)), **more)  # type: ignore[arg-type]


def efficiency(world: World, skip: int = 0) -> float:
    """Committed picks per second over the sum of the ranks' own rates, after `skip` rounds."""
    commits = [(at, c) for at, c in world.record.actions if isinstance(c, Committed)]
    (begin, _), rest = commits[skip], commits[skip + 1 :]
    picks = sum(sum(c.picks.values()) for _, c in rest)
    wall = rest[-1][0] - begin
    rates = sum(1 / (sim.batch_ms * MS) for sim in world.rig.ranks)
    return picks / wall / rates


@pytest.mark.parametrize(
    ("ms", "least"),
    [((20, 40, 80), 0.97), ((20, 20, 20), 0.96), ((20, 50), 0.96), ((20,) * 8, 0.95)],
)
def test_unequal_ranks_all_keep_busy(ms: tuple[float, ...], least: float) -> None:
    world = World(rig_of(*ms), wishes=Wishes(batch_size=1), samples=3000, seed=1)
    world.run()
    assert efficiency(world, skip=3) > least


def test_sync_is_bound_by_the_slowest() -> None:
    world = World(
        rig_of(20, 40, 80), wishes=Wishes(policy="sync", batch_size=1), samples=600, seed=1
    )
    world.run()
    assert efficiency(world) < 0.45


@pytest.mark.parametrize("point", DEATH_POINTS)
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_death_anywhere_costs_nothing_but_the_rank(point: str, nth: int, policy: str) -> None:
    ranks = (SimRank(0, 20), SimRank(1, 40, death=Death(point, nth)), SimRank(2, 30))
    wishes = Wishes(policy=policy, epochs=2, batch_size=1, anchor=4)
    world = World(Rig(ranks=ranks), wishes=wishes, samples=200, seed=nth)
    end = world.run().end
    assert end is not None
    assert (end.status, end.exit_code) == ("ok", 0)


def test_warm_up_and_one_outlier_do_not_steer() -> None:
    ranks = (
        SimRank(0, 20, warmup_ms=5000),
        SimRank(1, 40, stall_every=60, stall_ms=10_000),
    )
    world = World(Rig(ranks=ranks), wishes=Wishes(batch_size=1), samples=1500, seed=3)
    world.run()
    commits = [c for _, c in world.record.actions if isinstance(c, Committed)]
    for commit in commits[5:-1]:
        assert commit.picks["0"] > 0
        assert commit.picks["1"] > 0


def test_reasons_are_sentences() -> None:
    world = play(11)
    texts = [a.text for a in world.record.of(Note)]
    assert texts
    assert all(text and text == text.strip() for text in texts)
