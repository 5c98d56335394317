"""A save from the wish to the checkpoint, and every way it can go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flodl_shm.control.checkpoint_meta import CheckpointMeta, Evaluation, SavedFile
from flodl_shm.control.messages import (
    Action,
    DropSave,
    Note,
    PartSaved,
    Publish,
    Published,
    Save,
)
from flodl_shm.control.roles import Roles
from flodl_shm.control.saves import REASONS, Saves
from flodl_shm.errors import PeerBroke
from flodl_shm.ids import Nanos, Rank, Round, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import edge, meta_of, plan_of

S = 1_000_000_000


class Desk:
    """One `Saves` of two ranks, of which rank 1 is the fastest; `step` is where training stands."""

    def __init__(self, **wishes: object) -> None:
        self.step = 0
        self.saves = Saves(
            plan_of(**wishes), Roles("fastest", ()), stand=self._stand, scored=self._scored
        )

    def _stand(self) -> CheckpointMeta:
        return meta_of(global_step=self.step, ranks=(), save_reason="")

    def _scored(self, after: Round) -> tuple[Evaluation, ...]:
        return (Evaluation(0, float(after)),)

    def order(self, after: int, *living: int, committed: int = 0, now: int = 0) -> list[Action]:
        at = edge(after, *(living or (0, 1)), committed=committed)
        return list(self.saves.order(at, Nanos(now)))

    def part(self, rank: int, save: int = 1, error: str = "") -> list[Action]:
        files = () if error else (SavedFile(f"of-{rank}", 1, "x"),)
        report = PartSaved(Rank(rank), Row(rank), save, files=files, error=error)
        return list(self.saves.part(report))

    def advance(self, now: int = 0) -> list[Action]:
        return list(self.saves.advance(Nanos(now)))


def saved(actions: list[Action]) -> list[tuple[int, int, int, bool]]:
    return [(a.rank, a.save, a.after, a.has_model) for a in actions if isinstance(a, Save)]


def alerts(actions: list[Action]) -> str:
    return "; ".join(a.text for a in actions if isinstance(a, Note) and a.alert)


def test_a_save_is_published_with_what_its_round_held_when_every_part_is_there() -> None:
    desk = Desk()
    desk.saves.wish("request")
    assert saved(desk.order(5)) == [(0, 1, 5, False), (1, 1, 5, True)]
    desk.step = 50
    desk.saves.committed(Round(5), Nanos(0))
    desk.step = 60
    desk.saves.committed(Round(6), Nanos(0))
    assert desk.part(0) == []
    assert desk.advance() == []
    desk.part(1)
    (publish,) = desk.advance()
    assert isinstance(publish, Publish)
    assert (publish.meta.global_step, publish.meta.save_reason) == (50, "request")
    assert (publish.meta.ranks, publish.meta.evaluations) == ((0, 1), (Evaluation(0, 5.0),))
    assert [file.name for file in publish.files] == ["of-0", "of-1"]
    assert (desk.saves.collecting, desk.saves.pending) == (False, True)
    (note,) = desk.saves.published(Published(1, folder="ckpt/model-50"))
    assert isinstance(note, Note)
    assert "ckpt/model-50" in note.text
    assert not desk.saves.pending
    assert desk.advance() == []


def test_parts_do_not_publish_a_round_that_is_not_in_the_consensus() -> None:
    desk = Desk()
    desk.saves.wish("signal")
    desk.order(5)
    desk.part(0)
    desk.part(1)
    assert desk.advance() == []
    desk.saves.committed(Round(5), Nanos(0))
    assert len(desk.advance()) == 1


def test_a_state_that_is_in_the_consensus_already_is_written_down_at_once() -> None:
    desk = Desk()
    desk.step = 9
    desk.saves.wish("end")
    desk.order(5, committed=5)
    desk.step = 10
    desk.part(0)
    desk.part(1)
    (publish,) = desk.advance()
    assert isinstance(publish, Publish)
    assert publish.meta.global_step == 9


def test_many_wishes_for_one_state_make_one_save_with_the_weightiest_reason() -> None:
    desk = Desk()
    for reason in reversed(REASONS):
        desk.saves.wish(reason)
    assert len(saved(desk.order(5, committed=5))) == 2
    desk.saves.wish("signal")
    assert desk.order(5) == []
    assert desk.order(6) == []
    desk.part(0)
    desk.part(1)
    (publish,) = desk.advance()
    assert isinstance(publish, Publish)
    assert publish.meta.save_reason == REASONS[0]
    desk.saves.wish("signal")
    assert saved(desk.order(6)) == [(0, 2, 6, False), (1, 2, 6, True)]


def test_nothing_is_saved_before_anything_was_trained() -> None:
    desk = Desk()
    desk.saves.wish("signal")
    assert desk.order(1) == []
    assert desk.saves.collecting
    assert list(desk.saves.order(edge(1, 0, 1), Nanos(0), is_last=True)) == []
    assert not desk.saves.collecting


def test_where_nobody_publishes_no_wish_is_heard() -> None:
    desk = Desk(can_save=False)
    desk.saves.wish("request")
    assert desk.order(5) == []
    assert not desk.saves.pending


def test_no_more_than_two_saves_are_written_at_once() -> None:
    desk = Desk()
    for after in (5, 6, 7):
        desk.saves.wish("request")
        desk.order(after)
    assert desk.saves.collecting
    desk.saves.committed(Round(5), Nanos(0))
    desk.part(0)
    desk.part(1)
    desk.advance()
    assert saved(desk.order(8)) == [(0, 3, 8, False), (1, 3, 8, True)]


def test_a_dead_ranks_part_is_not_waited_for_and_one_that_came_is_kept() -> None:
    desk = Desk()
    desk.saves.wish("signal")
    desk.order(5, 0, 1, 2, committed=5)
    desk.part(1)
    assert list(desk.saves.bury(Rank(0))) == []
    assert list(desk.saves.bury(Rank(1))) == []
    desk.part(2)
    (publish,) = desk.advance()
    assert isinstance(publish, Publish)
    assert publish.meta.ranks == (1, 2)


@pytest.mark.parametrize("how", ["dead", "error", "silent"])
def test_without_the_model_a_save_is_dropped_and_another_rank_writes_the_next(how: str) -> None:
    desk = Desk(callback_timeout_s=10.0)
    desk.saves.wish("checkpoint")
    assert saved(desk.order(5, committed=5)) == [(0, 1, 5, False), (1, 1, 5, True)]
    desk.part(0)
    if how == "dead":
        said = list(desk.saves.bury(Rank(1)))
    elif how == "error":
        said = desk.part(1, error="disk full")
    else:
        assert desk.advance(20 * S) == []
        said = desk.advance(20 * S + 1)
    assert [a.save for a in said if isinstance(a, DropSave)] == [1]
    assert "save 1 is dropped: rank 1" in alerts(said)
    assert desk.saves.collecting
    living = (0,) if how == "dead" else (0, 1)
    assert (0, 2, 5, True) in saved(desk.order(5, *living, committed=5))
    assert desk.part(1) == []  # late, of the dropped one


def test_when_every_rank_has_failed_the_occasion_is_given_up_but_not_the_next() -> None:
    desk = Desk()
    desk.saves.wish("end")
    desk.order(5, committed=5)
    desk.part(1, error="disk full")
    desk.order(5, committed=5)
    desk.part(0, save=2, error="disk full")
    assert "ranks 0, 1 failed" in alerts(desk.order(5, committed=5))
    assert not desk.saves.pending
    desk.saves.wish("request")
    assert len(saved(desk.order(6))) == 2


def test_another_ranks_part_that_fails_leaves_a_checkpoint_without_it() -> None:
    desk = Desk()
    desk.saves.wish("end")
    desk.order(5, committed=5)
    said = desk.part(0, error="odd state")
    assert "rank 0 cannot write its part of save 1: odd state" in alerts(said)
    desk.part(1)
    (publish,) = desk.advance()
    assert isinstance(publish, Publish)
    assert publish.meta.ranks == (1,)


def test_a_part_that_never_comes_and_a_checkpoint_never_published_are_given_up() -> None:
    desk = Desk(callback_timeout_s=10.0)
    desk.saves.wish("end")
    desk.order(5, committed=5)
    desk.part(1)
    said = desk.advance(21 * S)
    assert "no word of it for 20 s" in alerts(said)
    assert isinstance(said[-1], Publish)
    assert said[-1].meta.ranks == (1,)
    assert desk.advance(40 * S) == []
    assert "save 1 is given up" in alerts(desk.advance(42 * S))
    assert not desk.saves.pending
    assert list(desk.saves.published(Published(1, folder="late"))) == []


def test_a_checkpoint_that_cannot_be_published_is_told_and_may_be_tried_again() -> None:
    desk = Desk()
    desk.saves.wish("request")
    desk.order(5, committed=5)
    desk.part(0)
    desk.part(1)
    desk.advance()
    said = list(desk.saves.published(Published(1, error="no space left")))
    assert alerts(said) == "save 1 cannot be published: no space left"
    assert not desk.saves.pending
    desk.saves.wish("end")
    assert len(saved(desk.order(5, committed=5))) == 2


def test_a_checkpoint_that_is_there_counts_though_an_older_one_could_not_be_removed() -> None:
    desk = Desk()
    desk.saves.wish("request")
    desk.order(5, committed=5)
    desk.part(0)
    desk.part(1)
    desk.advance()
    trouble = "m-1 is there, but an older one could not be removed"
    said = list(desk.saves.published(Published(1, folder="m-1", error=trouble)))
    assert alerts(said) == f"checkpoints: {trouble}"
    desk.saves.wish("end")
    assert saved(desk.order(5, committed=5)) == []  # that very state is there


def test_a_part_nobody_ordered_is_a_broken_peer() -> None:
    with pytest.raises(PeerBroke, match="save 1, never ordered"):
        Desk().part(0)
