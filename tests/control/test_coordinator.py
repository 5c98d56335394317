"""Single moves of the coordinator that whole simulated runs reach seldom or never."""

from __future__ import annotations

import pytest

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Attach,
    Attached,
    BuildArena,
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
    Ready,
    Stop,
    StopRequest,
    Tick,
)
from flodl_shm.control.options import Wishes
from flodl_shm.ids import Nanos, Rank, Round, Row

WISHES = Wishes(batch_size=1, epochs=1, policy="sync")


class Play:
    """Feeds events one nanosecond apart."""

    def __init__(self, ranks: int = 2, wishes: Wishes = WISHES) -> None:
        self.mind = Coordinator(wishes, ranks)
        self.now = 0
        self.said: list[Action] = []

    def tell(self, *events: Event) -> list[Action]:
        out: list[Action] = []
        for event in events:
            self.now += 1
            out += self.mind.step(event, Nanos(self.now))
        self.said += out
        return out

    def end(self) -> End:
        (end,) = [action for action in self.said if isinstance(action, End)]
        return end


def ready(
    rank: int, samples: int = 4, digest: str = "d", callbacks: tuple[str, ...] = ("evaluation",)
) -> Ready:
    return Ready(
        Rank(rank), Row(rank), digest, 8, 0, samples=samples, device="cpu", callbacks=callbacks
    )


def attached(rank: int) -> Attached:
    return Attached(Rank(rank), Row(rank))


def arrived(rank: int, number: int, steps: int, picks: int) -> Arrived:
    return Arrived(Rank(rank), Row(rank), Round(number), steps, steps, picks, first_ns=5, busy_ns=5)


def left(rank: int, number: int, *who: int) -> Left:
    return Left(Rank(rank), Row(rank), Round(number), tuple(Rank(r) for r in who))


def died(rank: int, cause: str = "signal 9 (SIGKILL)", **more: object) -> Died:
    return Died(Rank(rank), Row(rank), cause, **more)  # type: ignore[arg-type]


def finished(rank: int, digest: str = "same") -> Finished:
    return Finished(Rank(rank), Row(rank), digest)


def trained(play: Play) -> Play:
    """Two ranks, four samples, one per step: up to the last commit."""
    play.tell(ready(0), ready(1), attached(0), attached(1))
    for number, steps in ((1, 0), (2, 1), (3, 1)):
        picks = max(0, number - 1)
        play.tell(*(arrived(r, number, steps, picks) for r in (0, 1)))
        play.tell(*(left(r, number, 0, 1) for r in (0, 1)))
    return play


def told_of(actions: list[Action]) -> list[tuple[object, ...]]:
    """What scripts are told of epochs: (rank, epoch, loss, picks, value, closed)."""
    return [
        (a.rank, a.epoch, a.loss, a.picks, a.value, a.closed)
        for a in actions
        if isinstance(a, EpochMetrics)
    ]


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions if not isinstance(action, Note)]


def test_the_way_of_a_run() -> None:
    play = Play()
    assert kinds(play.tell(ready(0))) == []
    assert kinds(play.tell(ready(1))) == [BuildArena, Attach, Attach]
    assert kinds(play.tell(attached(0))) == []
    assert Grant in kinds(play.tell(attached(1)))
    play = trained(Play())
    assert kinds(play.said)[-1] is Evaluate
    told = play.tell(Evaluated(Rank(0), Row(0), 0, 0.5))
    assert kinds(told) == [EpochMetrics, EpochMetrics, Finish, Finish]
    assert told_of(told) == [(rank, 0, None, 4, 0.5, True) for rank in (0, 1)]
    play.tell(finished(0), finished(1))
    assert (play.end().status, play.end().exit_code) == ("ok", 0)
    assert play.mind.value == 0.5
    assert play.tell(Tick()) == []


def test_ranks_that_differ_end_the_run() -> None:
    play = Play()
    play.tell(ready(0), ready(1, digest="other"))
    assert play.end().exit_code == 2
    assert "differ" in play.end().reason


def test_a_user_error_ends_the_run_with_its_code() -> None:
    play = Play()
    play.tell(ready(0), died(1, "ValueError: no", user_error=True, exit_code=1))
    assert play.end() == End("failed", 1, "rank 1 failed: ValueError: no")


def test_a_script_that_never_trains_is_told_so() -> None:
    play = Play()
    play.tell(died(0, "exit 0"), died(1, "exit 0"))
    assert play.end().exit_code == 2
    assert "Trainer(...).run()" in play.end().reason


def test_losing_everybody_is_a_loss_of_peers() -> None:
    play = Play()
    play.tell(ready(0), ready(1), attached(0), attached(1), died(0), died(1))
    assert play.end().exit_code == 4


def test_a_death_is_counted_once() -> None:
    play = Play(3)
    alerts = [a for a in play.tell(died(2), died(2)) if isinstance(a, Note) and a.alert]
    assert len(alerts) == 1


def test_what_a_dead_rank_still_says_is_stale() -> None:
    play = Play()
    play.tell(died(1))
    notes = [a for a in play.tell(ready(1)) if isinstance(a, Note)]
    assert [note.topic for note in notes] == ["stale"]


@pytest.mark.parametrize("when", ["forming", "training", "evaluating"])
@pytest.mark.parametrize("event", [Stop(1, "SIGINT"), StopRequest(Rank(1), Row(1), "enough")])
def test_a_stop_lets_every_rank_copy_out(when: str, event: Event) -> None:
    play = Play()
    if when == "evaluating":
        trained(play)
    elif when == "training":
        play.tell(ready(0), ready(1), attached(0), attached(1))
    out = play.tell(event)
    if when == "training":  # rounds already issued are finished first
        assert Finish not in kinds(out)
        for number, steps in ((1, 0), (2, 1), (3, 1)):
            picks = max(0, number - 1)
            play.tell(*(arrived(r, number, steps, picks) for r in (0, 1)))
            out = play.tell(*(left(r, number, 0, 1) for r in (0, 1)))
    assert kinds(out)[-2:] == [Finish, Finish]
    play.tell(finished(0), finished(1, "other" if when == "forming" else "same"))
    assert play.end().status == "stopped"
    assert play.end().reason == ("SIGINT" if isinstance(event, Stop) else "rank 1: enough")


def test_a_request_to_stop_takes_nothing_back() -> None:
    play = trained(Play())
    play.tell(StopRequest(Rank(1), Row(1), "first"), StopRequest(Rank(0), Row(0), "second"))
    play.tell(finished(0), StopRequest(Rank(0), Row(0), "late"), finished(1))
    assert play.end().reason == "rank 1: first"


def test_an_epochs_figures_reach_the_living_before_what_comes_next() -> None:
    play = Play()
    play.tell(ready(0), ready(1), attached(0), attached(1))
    for number, steps in ((1, 0), (2, 1), (3, 1)):
        picks = max(0, number - 1)
        play.tell(*(arrived(r, number, steps, picks) for r in (0, 1)))
        out = play.tell(left(0, number, 0, 1))
    assert told_of(out) == [(rank, 0, None, 4, None, True) for rank in (0, 1)]
    assert kinds(out).index(EpochMetrics) < kinds(out).index(Evaluate)


def test_a_second_stop_ends_it_now() -> None:
    play = trained(Play())
    play.tell(Stop(2, "SIGINT"))
    assert play.end().status == "stopped"


def test_the_next_rank_scores_if_the_first_dies() -> None:
    play = trained(Play())
    (first,) = [a for a in play.said if isinstance(a, Evaluate)]
    out = play.tell(died(first.rank))
    assert [a.rank for a in out if isinstance(a, Evaluate)] == [1 - first.rank]


def test_an_evaluation_that_raises_is_told_and_ends_well() -> None:
    play = trained(Play())
    out = play.tell(Evaluated(Rank(0), Row(0), 0, None, error="ValueError: x"))
    assert any(isinstance(a, Note) and a.alert and "ValueError" in a.text for a in out)
    play.tell(finished(0), finished(1))
    assert play.end().status == "ok"


def test_every_nth_epoch_is_scored_between_its_last_round_and_the_next_window() -> None:
    play = Play(wishes=Wishes(batch_size=1, epochs=4, policy="sync", eval_every=2))
    play.tell(ready(0, samples=2), ready(1, samples=2), attached(0), attached(1))
    orders: list[type[Action]] = []
    for number in range(1, 6):
        picks = number - 1
        out = play.tell(*(arrived(r, number, min(1, picks), picks) for r in (0, 1)))
        out += play.tell(*(left(r, number, 0, 1) for r in (0, 1)))
        orders += [k for k in kinds(out) if k in (Evaluate, Grant)]
        if number == 3:
            told = play.tell(Evaluated(Rank(0), Row(0), 1, 0.2))
            assert told_of(told) == [(rank, 1, None, 2, 0.2, True) for rank in (0, 1)]
            assert kinds(told) == [EpochMetrics, EpochMetrics]
    scored = [a.epoch for a in play.said if isinstance(a, Evaluate)]
    assert scored == [1, 3]
    at = orders.index(Evaluate)
    assert orders[at + 1] is Grant


def test_ranks_that_end_with_different_parameters_are_our_bug() -> None:
    play = trained(Play())
    play.tell(Evaluated(Rank(0), Row(0), 0, 1.0), finished(0, "a"), finished(1, "b"))
    assert play.end().exit_code == 70
    assert "different parameters" in play.end().reason


def test_a_death_after_its_work_was_done_is_no_loss() -> None:
    play = trained(Play())
    play.tell(Evaluated(Rank(0), Row(0), 0, 1.0), finished(0), died(0), finished(1))
    assert play.end().status == "ok"


@pytest.mark.parametrize(
    "event",
    [
        arrived(0, 9, 1, 1),
        left(0, 9, 0),
        Evaluated(Rank(0), Row(0), 0, 1.0),
    ],
)
def test_reports_out_of_place_end_the_run_as_our_bug(event: Event) -> None:
    for play in (Play(), trained(Play()) if not isinstance(event, Evaluated) else Play()):
        play.tell(event)
        assert play.end().exit_code == 70


def test_fewer_picks_than_before_is_a_broken_peer() -> None:
    play = Play()
    play.tell(ready(0), ready(1), attached(0), attached(1))
    play.tell(arrived(0, 1, 0, 0), arrived(1, 1, 0, 0), left(0, 1, 0, 1))
    play.tell(arrived(0, 2, 1, 1), arrived(0, 3, 0, 0))
    assert "fewer than before" in play.end().reason


def test_contributors_must_be_the_same_for_ranks_and_coordinator() -> None:
    play = Play()
    play.tell(ready(0), ready(1), attached(0), attached(1))
    play.tell(arrived(0, 1, 0, 0), arrived(1, 1, 0, 0), left(0, 1, 0))
    assert "ranks saw contributors" in play.end().reason


def test_whom_the_run_waits_for_has_a_name() -> None:
    play = Play()
    assert play.mind.awaited() == {}
    play.tell(ready(0), ready(1), attached(0), attached(1), arrived(0, 1, 0, 0))
    assert play.mind.awaited() == {1: "its arrival in round 1"}
    play.tell(arrived(1, 1, 0, 0))
    assert play.mind.awaited() == dict.fromkeys((0, 1), "its part of the reduce of round 1")
    play.tell(left(0, 1, 0, 1))
    assert play.mind.awaited() == dict.fromkeys((0, 1), "its arrival in round 2")
    trained(play := Play())
    (scorer,) = [a.rank for a in play.said if isinstance(a, Evaluate)]
    assert play.mind.awaited() == {scorer: "the evaluation"}
    play.tell(Evaluated(Rank(0), Row(0), 0, 1.0), finished(0))
    assert play.mind.awaited() == {1: "its state"}


def test_a_window_left_early_under_sync_is_dealt_anew() -> None:
    """The script on rank 0 trains nothing in its first window: nobody waits, nothing is lost."""
    play = Play()
    said = play.tell(ready(0), ready(1), attached(0), attached(1))
    consumed, lazy = [0, 0], True
    for _ in range(20):
        grants = [action for action in said if isinstance(action, Grant)]
        if not grants:
            break
        said = []
        for number in sorted({grant.round for grant in grants}):
            for grant in (grant for grant in grants if grant.round == number):
                held = sum(stop - start for start, stop in grant.spans) + grant.after
                work = min(grant.ceiling, held - consumed[grant.rank])
                if work and grant.rank == 0 and lazy:
                    work, lazy = 0, False
                consumed[grant.rank] += work
                said += play.tell(arrived(grant.rank, number, work, consumed[grant.rank]))
            said += play.tell(left(0, number, 0, 1), left(1, number, 0, 1))
    (closed,) = [action for action in play.said if isinstance(action, EpochClosed)]
    assert (closed.done_once, closed.duplicated, closed.missing) == (4, 0, 0)
    assert sum(consumed) == 4
    assert not lazy
