"""What a training may go on from, what it takes up, and what it leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from flodl_shm.control.checkpoint_meta import CheckpointMeta, OpenEpoch
from flodl_shm.control.epoch_function import EpochFunction
from flodl_shm.control.messages import Action, Note, Ready, Resumed
from flodl_shm.control.reduce_cycle import ReduceCycle
from flodl_shm.control.resume import Resume, check, stand, take_up
from flodl_shm.control.roles import Roles
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import meta_of, plan_of

if TYPE_CHECKING:
    from flodl_shm.control.options import Settled

FOLDER = "ckpt/model-7"


def ready(digest: str = "d", names: tuple[str, ...] = ("a", "b")) -> Ready:
    return Ready(Rank(0), Row(0), digest, 8, 0, samples=100, device="cpu", names=names)


def resumed(**facts: object) -> Resume:
    return Resume(FOLDER, meta_of(**facts))


def notes(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Note)]


def taken_up(resume: Resume, plan: Settled) -> tuple[ReduceCycle, list[Action]]:
    rounds = ReduceCycle(plan, resume.meta)
    return rounds, list(take_up(resume, rounds))


def test_the_same_training_may_go_on_in_another_world_with_other_batches() -> None:
    check(resumed(), ready(), plan_of(5, batch_size=4, policy="sync", epochs=9, tail="keep"))


@pytest.mark.parametrize(
    ("facts", "report", "words"),
    [
        ({}, ready("e", ("a", "c")), "its model has b, the script's has c"),
        ({}, ready("e", ("a",)), "its model has b, the script's has nothing"),
        ({}, ready("e"), "its model's layout is d, the script's is e"),
        ({"samples": 90}, ready(), "made with a dataset of 90 samples, this run has 100"),
        ({"augment": 2}, ready(), "made with --augment 2, this run has 1"),
        ({"seed": 5}, ready(), "made with seed 5, this run has 0"),
    ],
)
def test_another_one_is_refused_with_the_difference(
    facts: dict[str, object], report: Ready, words: str
) -> None:
    with pytest.raises(BadConfig, match=f"the checkpoint {FOLDER} does not fit: .*{words}"):
        check(resumed(**facts), report, plan_of())


def test_a_rank_takes_its_own_state_or_anothers_by_turns() -> None:
    of = resumed(ranks=(0, 2, 3)).state_of
    assert [of(Rank(rank)) for rank in range(6)] == [0, 2, 2, 3, 2, 3]
    assert resumed(ranks=()).state_of(Rank(0)) is None


def test_where_it_goes_on_is_told_in_a_sentence() -> None:
    begun = OpenEpoch(
        epoch=1, picks=100, dropped=0, done=((0, 4), (9, 10)), loss_sum=0, loss_count=0
    )
    _, said = taken_up(resumed(open_epochs=(begun,)), plan_of(epochs=3))
    told = said[0]
    assert isinstance(told, Resumed)
    assert told.text == "goes on from ckpt/model-7: epoch 1 of 3, 5 of its 100 picks done, step 7"
    assert notes(said) == []
    _, said = taken_up(resumed(epochs=3), plan_of(epochs=5))
    assert said[0].text.startswith("goes on from ckpt/model-7: epoch 1 of 5 (3 were planned)")


def learned(ranks: int = 2, policy: str = "cadence", steps: int = 10) -> dict[str, object]:
    state = {"anchor_steps": steps, "anchor_rank": 1, "costs_ns": [1e6, 4e6], "windows": 9}
    return {"el_che": state, "guard": {"recent": [0.1, 0.2]}, "policy": policy}


def test_speeds_and_the_guards_memory_are_taken_up() -> None:
    rounds, said = taken_up(resumed(**learned()), plan_of(epochs=3))
    assert notes(said) == []
    assert rounds.balance.calibrated
    assert rounds.balance.counts([Rank(0), Rank(1)])[Rank(1)] == 10
    assert rounds.guard.to_state() == (0.1, 0.2)


def test_a_windows_length_is_its_policys_own() -> None:
    rounds, _ = taken_up(resumed(**learned(policy="sync", steps=1)), plan_of(epochs=3, anchor=7))
    assert rounds.balance.calibrated
    assert rounds.balance.counts([Rank(0), Rank(1)])[Rank(1)] == 7


def test_what_fits_another_world_only_is_learned_afresh_and_said() -> None:
    rounds, said = taken_up(resumed(**learned()), plan_of(3, epochs=3, batch_size=2))
    (note,) = notes(said)
    assert note == (
        "speeds are measured afresh: 2 ranks then, 3 now, (1, 1) picks a batch then, (2, 2, 2) now"
    )
    assert not rounds.balance.calibrated
    assert rounds.guard.to_state() == ()


@pytest.mark.parametrize("epochs", [3, 2])
def test_a_finished_training_has_nothing_left_and_says_so(epochs: int) -> None:
    rounds, said = taken_up(resumed(epoch=3), plan_of(epochs=epochs))
    assert rounds.schedule.finished
    assert rounds.last_epoch == 2
    (note,) = (action for action in said if isinstance(action, Note))
    assert note.text == f"nothing is left to train: 3 epochs are done, {epochs} are asked for"
    assert note.alert


def test_where_it_stands_can_be_written_down_and_taken_up_again() -> None:
    plan = plan_of(epochs=3)
    begun = OpenEpoch(epoch=1, picks=90, dropped=3, done=((0, 4),), loss_sum=2.0, loss_count=4)
    first = resumed(open_epochs=(begun,), lr=0.3, **learned())
    rounds, _ = taken_up(first, plan)
    rounds.open_epoch({Rank(0): Row(0), Rank(1): Row(1)})
    rate = EpochFunction(Roles("fastest", ()), first.meta)
    meta = stand(rounds, ready(), rate, first)
    again = msgspec.json.decode(msgspec.json.encode(meta), type=CheckpointMeta)
    assert again.open_epochs == (begun,)
    assert (again.epoch, again.global_step, again.reduce, again.lr) == (1, 7, 5, 0.3)
    rounds, _ = taken_up(Resume(FOLDER, again), plan)
    assert rounds.balance.to_state() == meta.el_che
    epoch = rounds.open_epoch({Rank(0): Row(0)})
    assert (epoch.number, epoch.pool.done, epoch.pool.total, epoch.loss) == (1, 4, 90, 0.5)
    assert rounds.open_epoch({Rank(0): Row(0)}).pool.total == 100
