"""Who is asked to score, what the answer answers, and what is lost with a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flodl_shm.control.checkpoint_meta import Evaluation
from flodl_shm.control.evaluations import Evaluations
from flodl_shm.control.messages import Evaluate, Evaluated, Note
from flodl_shm.control.roles import Roles
from flodl_shm.errors import PeerBroke
from flodl_shm.ids import Rank, Round, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import edge

HAS = ("evaluation",)


def answer(rank: int, epoch: int, value: float | None = 0.5) -> Evaluated:
    return Evaluated(Rank(rank), Row(rank), epoch, value)


def test_the_holder_is_asked_and_its_answer_remembered_by_round() -> None:
    scores = Evaluations(Roles("fastest", HAS), [Evaluation(0, 0.1)])
    (note, order) = scores.order(edge(5, 0, 1, epoch=1))
    assert isinstance(note, Note)
    assert order == Evaluate(Rank(1), 1)
    assert not scores.take(answer(1, 1)).is_final
    assert scores.until(Round(4)) == (Evaluation(0, 0.1),)
    assert scores.until(Round(5)) == (Evaluation(0, 0.1), Evaluation(1, 0.5))


def test_one_answer_for_one_question() -> None:
    scores = Evaluations(Roles("0", HAS))
    list(scores.order(edge(5, 0, 1)))
    with pytest.raises(PeerBroke, match="rank 1 evaluated without being asked"):
        scores.take(answer(1, 0))
    scores.take(answer(0, 0))
    with pytest.raises(PeerBroke, match="without being asked"):
        scores.take(answer(0, 0))


def test_an_earlier_answer_is_not_taken_for_the_final_one() -> None:
    scores = Evaluations(Roles("0", HAS))
    list(scores.order(edge(5, 0)))
    list(scores.order(edge(5, 0), is_final=True))
    assert scores.scorer == 0
    assert [scores.take(answer(0, 0)).is_final for _ in range(2)] == [False, True]
    assert scores.scorer is None


def test_wishes_are_answered_one_at_a_time_and_not_before_the_first_round() -> None:
    scores = Evaluations(Roles("0", HAS))
    assert list(scores.order_due(edge(3, 0))) == []
    scores.wish()
    assert list(scores.order_due(edge(0, 0))) == []
    assert list(scores.order_due(edge(3, 0))) == [Evaluate(Rank(0), 0)]
    scores.wish()
    assert list(scores.order_due(edge(4, 0))) == []
    scores.take(answer(0, 0, None))
    assert list(scores.order_due(edge(4, 0))) == [Evaluate(Rank(0), 0)]
    assert scores.until(Round(9)) == ()


def test_an_epochs_end_answers_a_wish_too_and_asks_once() -> None:
    scores = Evaluations(Roles("0", HAS))
    scores.wish()
    assert len(list(scores.order(edge(5, 0)))) == 1
    assert list(scores.order(edge(5, 0))) == []
    assert list(scores.order_due(edge(6, 0))) == []


def test_what_a_dead_rank_was_asked_is_lost_but_the_final_one_is_asked_again() -> None:
    scores = Evaluations(Roles("fastest", HAS))
    list(scores.order(edge(5, 0, 1, epoch=2)))
    list(scores.order(edge(6, 0, 1), is_final=True))
    (note,) = scores.bury(Rank(1))
    assert isinstance(note, Note)
    assert note.text == "the evaluation of epoch 2 is lost with rank 1"
    assert scores.scorer is None
    assert Evaluate(Rank(0), 0) in list(scores.order(edge(6, 0), is_final=True))


def test_nobody_scores_if_the_named_rank_is_dead_or_there_is_no_function() -> None:
    scores = Evaluations(Roles("1", HAS))
    (note,) = scores.order(edge(5, 0))
    assert isinstance(note, Note)
    assert note.alert
    assert list(scores.order(edge(6, 0))) == []
    assert list(Evaluations(Roles("1", ())).order(edge(5, 0, 1))) == []
