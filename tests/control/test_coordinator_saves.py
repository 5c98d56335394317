"""Whole ways of a run that saves, is stopped, goes on, and calls the user's functions."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from flodl_shm.control.checkpoint_meta import SavedFile
from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    AdjustRate,
    Arrived,
    Attach,
    Attached,
    CallbackRan,
    CallEpochFn,
    Committed,
    Died,
    End,
    EpochClosed,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Finished,
    Grant,
    Left,
    Note,
    PartSaved,
    Publish,
    Published,
    Quit,
    Ready,
    Request,
    Resumed,
    Save,
    SaveRequest,
    Stop,
)
from flodl_shm.control.options import Wishes
from flodl_shm.control.resume import Resume
from flodl_shm.ids import Nanos, Rank, Round, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import meta_of

WISHES = Wishes(batch_size=1, epochs=2, policy="sync", can_save=True)
RANKS = (0, 1)


class Play:
    """Two ranks under sync with two samples: round 1 spreads, then one round is an epoch."""

    def __init__(
        self, wishes: Wishes = WISHES, resume: Resume | None = None, has: tuple[str, ...] = ()
    ) -> None:
        self.mind = Coordinator(wishes, len(RANKS), resume)
        self.has = has
        self.now = 0
        self.said: list[Action] = []

    def tell(self, *events: Event) -> list[Action]:
        out: list[Action] = []
        for event in events:
            self.now += 1
            out += self.mind.step(event, Nanos(self.now))
        self.said += out
        return out

    def begin(self) -> list[Action]:
        ready = [
            Ready(Rank(r), Row(r), "d", 8, 0, samples=2, device="cpu", callbacks=self.has)
            for r in RANKS
        ]
        return self.tell(*ready, *(Attached(Rank(r), Row(r)) for r in RANKS))

    def round(self, number: int) -> list[Action]:
        """Both ranks do round `number`; every round but the first trains one pick each."""
        done = max(0, number - 1)
        steps = int(number > 1)
        arrived = [Arrived(Rank(r), Row(r), Round(number), steps, steps, done) for r in RANKS]
        left = [Left(Rank(r), Row(r), Round(number), (Rank(0), Rank(1))) for r in RANKS]
        return self.tell(*arrived, *left)

    def parts(self, save: int) -> list[Action]:
        file = SavedFile("model", 1, "x")
        return self.tell(*(PartSaved(Rank(r), Row(r), save, files=(file,)) for r in RANKS))

    def of(self, *kinds: type[Action]) -> list[Action]:
        return [action for action in self.said if isinstance(action, kinds)]

    def order_of(self, *kinds: type[Action]) -> list[str]:
        return [type(action).__name__ for action in self.of(*kinds) if _rank(action) in (0, None)]


def _rank(action: Action) -> object:
    return getattr(action, "rank", None)


def finished(rank: int) -> Finished:
    return Finished(Rank(rank), Row(rank), "same")


def alerts(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Note) and action.alert]


def test_every_nth_epoch_and_the_end_are_saved_right_after_their_last_round() -> None:
    play = Play(
        msgspec.structs.replace(WISHES, save_every=1, save_at_end=True, eval_every=1),
        has=("evaluation",),
    )
    play.begin()
    for number in (1, 2, 3):
        play.round(number)
    assert play.order_of(Save, Evaluate, Grant) == [
        "Grant", "Grant", "Evaluate", "Save", "Grant", "Save", "Evaluate",
    ]  # fmt: skip
    assert [(a.save, a.after, a.epoch) for a in play.of(Save) if a.rank == 0] == [
        (1, 2, 0), (2, 3, 1),
    ]  # fmt: skip
    play.tell(Evaluated(Rank(0), Row(0), 0, 0.5))
    play.parts(1)
    (first,) = play.of(Publish)
    assert (first.meta.save_reason, first.meta.epoch, first.meta.reduce) == ("checkpoint", 1, 2)
    assert first.meta.global_step == 2
    assert [past.epoch for past in first.meta.closed_epochs] == [0]
    assert [one.value for one in first.meta.evaluations] == [0.5]
    play.tell(Evaluated(Rank(0), Row(0), 1, 0.6))
    assert not play.of(Finish)
    out = play.parts(2)
    assert [type(a) for a in out if not isinstance(a, Note)] == [Publish, Finish, Finish]
    assert play.of(Publish)[1].meta.save_reason == "end"
    play.tell(finished(0), finished(1), Published(1, folder="one"))
    assert not play.of(End)
    play.tell(Published(2, folder="two"))
    assert play.of(End) == [End("ok", 0, "all epochs done")]


@pytest.mark.parametrize("why", ["stop", "script"])
def test_a_stop_saves_what_there_is_and_ends_when_it_is_visible(why: str) -> None:
    play = Play()
    play.begin()
    play.round(1)
    out = play.tell(Stop(1, "SIGTERM"), Stop(1, "SIGTERM"))
    assert [(a.save, a.after) for a in out if isinstance(a, Save)] == [(1, 2), (1, 2)]
    assert not [a for a in play.round(2) if isinstance(a, Finish)]
    play.parts(1)
    assert play.of(Publish)[0].meta.save_reason == "graceful_shutdown"
    assert len(play.of(Finish)) == 2
    play.tell(finished(0), finished(1), Published(1, error="no space left"))
    assert play.of(End) == [End("stopped", 0, "SIGTERM")]


def test_a_second_stop_waits_for_no_save() -> None:
    play = Play()
    play.begin()
    play.round(1)
    play.tell(Stop(1, "SIGTERM"), Stop(2, "SIGTERM"))
    assert play.of(End) == [End("stopped", 0, "SIGTERM")]


@pytest.mark.parametrize("event", [SaveRequest("SIGUSR1"), Request(Rank(1), Row(1), "checkpoint")])
def test_a_save_can_be_asked_for_at_any_time(event: Event) -> None:
    play = Play()
    assert play.tell(SaveRequest("too early")) == []
    play.begin()
    out = play.tell(event)  # round 1 is under way, round 2 is known to the ranks
    assert [(a.save, a.after) for a in out if isinstance(a, Save)] == [(1, 2), (1, 2)]


def test_what_is_asked_for_after_the_end_keeps_nobody() -> None:
    play = Play()
    play.begin()
    for number in (1, 2, 3):
        play.round(number)
    assert len(play.of(Finish)) == 2
    play.tell(SaveRequest("late"), Request(Rank(0), Row(0), "checkpoint"))
    play.tell(finished(0), finished(1))
    assert play.of(End) == [End("ok", 0, "all epochs done")]


def test_an_evaluation_can_be_asked_for_and_is_told_to_all() -> None:
    play = Play(has=("evaluation",))
    play.begin()
    out = play.tell(Request(Rank(1), Row(1), "evaluation"))
    assert [(a.rank, a.epoch) for a in out if isinstance(a, Evaluate)] == [(0, 0)]
    out = play.tell(Evaluated(Rank(0), Row(0), 0, 0.5))
    told = [(a.rank, a.value, a.closed) for a in out if isinstance(a, EpochMetrics)]
    assert told == [(0, 0.5, False), (1, 0.5, False)]
    play.tell(Request(Rank(1), Row(1), "tea"))
    assert play.of(End)[0].exit_code == 70


def test_an_epoch_begins_when_its_function_has_returned_on_the_rate_it_wants() -> None:
    play = Play(has=("epoch",))
    play.begin()
    assert play.mind.awaited() == {0: "its arrival in round 1", 1: "its arrival in round 1"}
    play.round(1)
    assert play.mind.awaited() == play.mind.in_callback() == {0: "the epoch function"}
    play.tell(CallbackRan(Rank(0), Row(0), "epoch", 0, lr=0.1))
    assert play.mind.in_callback() == {}
    assert play.order_of(CallEpochFn, AdjustRate, Grant) == [
        "Grant", "CallEpochFn", "AdjustRate", "Grant",
    ]  # fmt: skip
    out = play.round(2)
    assert [a.epoch for a in out if isinstance(a, CallEpochFn)] == [1]
    out = play.tell(Died(Rank(0), Row(0), "signal 9"))
    assert [(a.rank, a.epoch) for a in out if isinstance(a, CallEpochFn)] == [(1, 1)]
    assert not [a for a in out if isinstance(a, Grant)]
    out = play.tell(CallbackRan(Rank(1), Row(1), "epoch", 1, error="ValueError: no"))
    assert alerts(out) == ["the epoch function failed in epoch 1: ValueError: no"]
    assert [a.rank for a in out if isinstance(a, Grant)] == [1, 1]


def test_a_stop_waits_for_no_function() -> None:
    play = Play(msgspec.structs.replace(WISHES, can_save=False), has=("epoch",))
    play.begin()
    play.round(1)
    play.tell(Stop(1, "SIGINT"))
    assert len(play.of(Finish)) == 2
    play.tell(CallbackRan(Rank(0), Row(0), "epoch", 0, lr=0.5), finished(0), finished(1))
    assert play.of(AdjustRate) == []
    assert play.of(End)[0].status == "stopped"


def test_errors_of_other_functions_and_a_rank_that_leaves_are_told() -> None:
    play = Play()
    play.begin()
    out = play.tell(CallbackRan(Rank(1), Row(1), "metrics", 0, error="KeyError: x"))
    assert alerts(out) == ["the metrics function raised on rank 1: KeyError: x"]
    assert alerts(play.tell(CallbackRan(Rank(1), Row(1), "checkpoint", 0))) == []
    out = play.tell(Quit(Rank(1), Row(1), "the loop was left"))
    assert "rank 1 left the training: the loop was left" in [
        a.text for a in out if isinstance(a, Note)
    ]


@pytest.mark.parametrize(
    "event", [Request(Rank(0), Row(0), "checkpoint"), PartSaved(Rank(0), Row(0), 1)]
)
def test_a_report_before_the_run_has_begun_is_a_broken_peer(event: Event) -> None:
    play = Play()
    play.tell(event)
    assert play.of(End)[0].exit_code == 70


def test_a_setting_without_effect_says_so() -> None:
    play = Play(msgspec.structs.replace(WISHES, can_save=False, save_every=2))
    assert "save_every 2 has no effect in a plain python process" in alerts(play.begin())[0]


# ---- resume ------------------------------------------------------------------------------------


def resumed(**facts: object) -> Resume:
    past = EpochClosed(epoch=0, picks=2, done_once=2, duplicated=0, missing=0, dropped=0, loss=None)
    plain = {"samples": 2, "epochs": 2, "policy": "sync", "closed_epochs": (past,)}
    return Resume("ckpt/model-7", meta_of(**{**plain, **facts}))


def test_a_run_goes_on_where_the_checkpoint_stood() -> None:
    play = Play(resume=resumed(lr=0.3, ranks=(1,)), has=("epoch",))
    play.begin()
    assert [type(a).__name__ for a in play.said if not isinstance(a, Note)] == [
        "Resumed", "BuildArena", "Attach", "Attach", "AdjustRate", "AdjustRate", "Issued", "Grant",
        "Grant", "CallEpochFn",
    ]  # fmt: skip
    attach = play.of(Attach)[0]
    assert (attach.checkpoint, attach.state_of, attach.global_step) == ("ckpt/model-7", 1, 7)
    play.round(1)
    play.tell(CallbackRan(Rank(0), Row(0), "epoch", 1))
    play.round(2)
    assert [a.epoch for a in play.of(EpochClosed)] == [1]
    assert play.of(Committed)[-1].global_step == 9


def test_a_finished_training_resumes_to_its_evaluation_and_the_end() -> None:
    play = Play(
        msgspec.structs.replace(WISHES, save_at_end=True),
        resume=resumed(
            epoch=2,
            closed_epochs=(
                *resumed().meta.closed_epochs,
                EpochClosed(
                    epoch=1, picks=2, done_once=2, duplicated=0, missing=0, dropped=0, loss=None
                ),
            ),
        ),
        has=("evaluation", "epoch"),
    )
    play.begin()
    assert play.of(Grant, Save, CallEpochFn) == []
    assert [(a.rank, a.epoch) for a in play.of(Evaluate)] == [(0, 1)]
    out = play.tell(Evaluated(Rank(0), Row(0), 1, 0.5))
    told = [(a.rank, a.value) for a in out if isinstance(a, EpochMetrics)]
    assert told == [(0, 0.5), (1, 0.5)]
    play.tell(finished(0), finished(1))
    assert play.of(End) == [End("ok", 0, "all epochs done")]
    assert play.mind.value == 0.5


def test_another_model_is_refused_before_any_memory_is_asked_for() -> None:
    play = Play(resume=resumed(digest="other"))
    play.begin()
    (end,) = play.of(End)
    assert end.exit_code == 2
    assert "does not fit: its model has a, the script's has nothing" in end.reason
    assert play.of(Attach, Resumed) == []
