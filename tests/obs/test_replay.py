"""Journals of simulated runs, stepped again: alike, torn, and tampered with."""

from __future__ import annotations

import json
import random

import pytest

from flodl_shm.cli.main import main
from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import Died, End, Note, Publish, Tick
from flodl_shm.control.options import Wishes
from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.journal import Journal, Record, read
from flodl_shm.obs.replay import replay
from flodl_shm.sim.rig import DEATH_POINTS, Death, Errands, Rig, SimRank
from flodl_shm.sim.world import World

JOURNALS = 20


def rig_of(seed):
    """Two to four ranks; every second run has a death, every third a throttled rank. All save."""
    rng = random.Random(seed)
    ranks = [SimRank(Rank(n), rng.choice((10.0, 20.0, 35.0))) for n in range(rng.randint(2, 4))]
    if seed % 2:
        death = Death(rng.choice(DEATH_POINTS), rng.randint(1, 3))
        ranks[1] = SimRank(Rank(1), 20.0, death=death)
    if seed % 3 == 0:
        ranks[0] = SimRank(Rank(0), 10.0, throttle_at_ms=300.0, throttle=4.0)
    errands = Errands(part_fails=0.2, publish_fails=0.2, requests=0.05, save_at_ms=50.0)
    stop_at_ms = 900.0 if seed == 8 else float("inf")
    return Rig(ranks=tuple(ranks), stop_at_ms=stop_at_ms, errands=errands)


def record(seed, path, start=None):
    """Play a run and write it as the launcher would, each event before its actions."""
    rig = rig_of(seed)
    wishes = Wishes(
        policy=("sync", "cadence")[seed // 2 % 2],
        epochs=2,
        batch_size=2,
        can_save=True,
        save_every=1,
        eval_every=1,
    )
    callbacks = ("epoch", "checkpoint", "evaluation", "metrics")
    world = World(rig, wishes=wishes, samples=80, seed=seed, callbacks=callbacks, start=start)
    journal = Journal(path, warn=pytest.fail)
    size = len(rig.ranks)
    journal.header(
        run_id="sim",
        started="",
        at=Nanos(0),
        versions={},
        world_size=size,
        flags=wishes,
        resume=world.coordinator.resume,
    )
    coordinator = world.coordinator

    class Recorded:
        def step(self, event, now):
            journal.write("event", event, now)
            actions = coordinator.step(event, now)
            for action in actions:
                journal.write("action", action, now)
            return actions

        def __getattr__(self, name):
            return getattr(coordinator, name)

    world.coordinator = Recorded()
    world.run()
    journal.close()
    return world


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    place = tmp_path_factory.mktemp("journals")
    paths = [place / f"{seed}.jsonl" for seed in range(JOURNALS)]
    worlds = [record(seed, path) for seed, path in enumerate(paths)]
    died = sum(any(isinstance(e, Died) for _, e in world.record.events) for world in worlds)
    assert died >= 6
    assert {world.coordinator.settled_plan.policy for world in worlds} == {"sync", "cadence"}
    return paths


def verdict_of(path):
    header, *records = read(path)
    return replay(
        records, Coordinator(header.flags, header.world_size, header.resume).step
    ), records


@pytest.mark.parametrize("seed", range(JOURNALS))
def test_a_recorded_run_comes_out_the_same(recorded, seed, capsys):
    assert main(["replay", str(recorded[seed])]) == 0
    out = capsys.readouterr().out
    assert out.startswith("same: ")
    assert "before the run did" not in out


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_resumed_run_comes_out_the_same_from_its_journal_alone(seed, tmp_path, capsys):
    first = record(seed, tmp_path / "first.jsonl")
    start = first.restart(first.record.of(Publish)[0])
    record(seed + 4, tmp_path / "second.jsonl", start)
    assert main(["replay", str(tmp_path / "second.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("same: ")


def test_a_journal_cut_anywhere_is_the_same_as_far_as_it_goes(recorded, tmp_path, capsys):
    whole = recorded[1].read_bytes()
    rng = random.Random(1)
    path = tmp_path / "cut.jsonl"
    for cut in [rng.randrange(whole.index(b"\n") + 1, len(whole)) for _ in range(25)]:
        path.write_bytes(whole[:cut])
        assert main(["replay", "--json", str(path)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["same"]
        assert not told["complete"]
        assert told["events"] + told["actions"] == whole[:cut].count(b"\n") - 1


@pytest.mark.parametrize("seed", range(JOURNALS))
def test_a_changed_action_is_the_first_difference(recorded, seed, tmp_path, capsys):
    lines = recorded[seed].read_bytes().splitlines()
    places = [n for n, line in enumerate(lines) if b'"kind":"action"' in line]
    place = random.Random(seed).choice(places)
    changed = json.loads(lines[place])
    full = (key for key, value in changed["message"].items() if key != "type" and value)
    key = next(full, "rank")  # an order to rank 0 about epoch 0
    value = changed["message"][key]
    changed["message"][key] = value + 1 if isinstance(value, int | float) else type(value)()
    if isinstance(value, dict) and key == "plan":
        changed["message"][key] = {**value, "seed": 999}
    lines[place] = json.dumps(changed).encode()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert main(["replay", str(tmp_path), "--json"]) == 1
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["line"] == place + 1
    assert difference["index"] == place - 1
    assert difference["at_s"] == pytest.approx(changed["at"] / 1e9)
    assert json.loads(difference["expected"]) == changed["message"]
    assert difference["got"] != difference["expected"]
    assert main(["replay", str(tmp_path)]) == 1
    assert f"(line {place + 1})" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [0, 1])
def test_a_missing_and_an_added_action_are_found(recorded, seed):
    verdict, records = verdict_of(recorded[seed])
    assert verdict.difference is None
    header = next(read(recorded[seed]))
    first = next(n for n, one in enumerate(records) if one.kind == "action")

    def again(changed):
        return replay(
            changed, Coordinator(header.flags, header.world_size, header.resume).step
        ).difference

    assert again(records[:first] + records[first + 1 :]).index == first
    extra = Record("action", records[first].at, Note("made", "up"))
    found = again([*records[:first], extra, *records[first:]])
    assert (found.index, "made" in found.expected) == (first, True)
    lone = again([extra, *records])
    assert (lone.index, lone.got, lone.event) == (0, "nothing", "nothing")


def test_a_changed_event_changes_what_follows(recorded):
    _, records = verdict_of(recorded[0])
    header = next(read(recorded[0]))
    without = [one for one in records if type(one.message).__name__ != "Ready"]
    found = replay(
        without, Coordinator(header.flags, header.world_size, header.resume).step
    ).difference
    assert found is not None


def test_a_remark_of_the_launcher_is_passed_over_and_ends_the_run():
    end = End(status="failed", exit_code=3, reason="no memory")
    verdict = replay([Record("note", Nanos(1), end)], lambda event, now: [])
    assert (verdict.difference, verdict.is_complete) == (None, True)


def test_a_coordinator_that_chokes_is_a_difference():
    def step(event, now):
        raise KeyError("round 9")

    records = [Record("event", Nanos(1), Tick()), Record("action", Nanos(1), Note("a", "b"))]
    assert replay(records, step).difference.got == "raised KeyError: 'round 9'"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "is empty"),
        (b"no json\n", "no record of a journal"),
        (
            b'{"schema":1,"run_id":"r","started":"","started_at":0,"versions":{}}\n',
            "does not say how many ranks",
        ),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path, capsys, text, sentence):
    (tmp_path / "journal.jsonl").write_bytes(text)
    assert main(["replay", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "there is no run in" in capsys.readouterr().err
