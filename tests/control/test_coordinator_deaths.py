"""What a death costs the run: the floor, and ranks that come back. Single moves."""

from __future__ import annotations

from flodl_shm.control.checkpoint_meta import SavedFile
from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Attach,
    Attached,
    Died,
    End,
    Event,
    Grant,
    Kill,
    Left,
    Lend,
    Lent,
    Note,
    PartSaved,
    Present,
    Publish,
    Published,
    Quit,
    Ready,
    Rejoined,
    Save,
    Spawn,
    Stop,
    Tick,
)
from flodl_shm.control.options import Survival, Wishes
from flodl_shm.ids import Nanos, Rank, Round, Row

S = 1_000_000_000


class Play:
    """Ranks under sync with many samples; each event comes a millisecond after the one before."""

    def __init__(self, survival: Survival, ranks: int = 2, **wishes: object) -> None:
        plain = {"batch_size": 1, "policy": "sync", "can_save": True, "survival": survival}
        self.mind = Coordinator(Wishes(**{**plain, **wishes}), ranks)  # type: ignore[arg-type]
        self.ranks = ranks
        self.now = 0
        self.said: list[Action] = []

    def tell(self, *events: Event, after_s: float = 0.001) -> list[Action]:
        out: list[Action] = []
        for event in events:
            self.now += int(after_s * S)
            out += self.mind.step(event, Nanos(self.now))
        self.said += out
        return out

    def train(self) -> Play:
        """All are in round 2."""
        ranks = range(self.ranks)
        self.tell(*(ready(rank) for rank in ranks), *(attached(rank) for rank in ranks))
        self.round(1, steps=0, picks=0)
        return self

    def round(self, number: int, *, steps: int = 1, picks: int, who: tuple[int, ...] = ()) -> None:
        ranks = who or tuple(range(self.ranks))
        self.tell(*(arrived(r, number, steps, picks) for r in ranks))
        self.tell(*(left(r, number, *ranks) for r in ranks))

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.said if isinstance(action, kind)]

    def end(self) -> End | None:
        ends = [action for action in self.said if isinstance(action, End)]
        return ends[0] if ends else None


def ready(rank: int, row: int | None = None, digest: str = "d") -> Ready:
    return Ready(
        Rank(rank), Row(rank if row is None else row), digest, 8, 0, samples=99, device="cpu"
    )


def attached(rank: int, row: int | None = None) -> Attached:
    return Attached(Rank(rank), Row(rank if row is None else row))


def arrived(rank: int, number: int, steps: int, picks: int, row: int | None = None) -> Arrived:
    place = Row(rank if row is None else row)
    return Arrived(Rank(rank), place, Round(number), steps, steps, picks, first_ns=5, busy_ns=5)


def left(rank: int, number: int, *who: int, row: int | None = None) -> Left:
    place = Row(rank if row is None else row)
    return Left(Rank(rank), place, Round(number), tuple(Rank(r) for r in who))


def died(rank: int, row: int | None = None, cause: str = "signal 9", **more: object) -> Died:
    return Died(Rank(rank), Row(rank if row is None else row), cause, **more)  # type: ignore[arg-type]


def failed(rank: int, row: int | None = None, **more: object) -> Died:
    return died(rank, row, "ValueError: x", user_error=True, **more)


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions if not isinstance(action, Note)]


# ---- the floor -------------------------------------------------------------------------------


def test_a_breach_finishes_the_window_saves_and_fails_with_who_is_missing() -> None:
    play = Play(Survival(max_failures=0)).train()
    play.round(2, picks=1)
    assert kinds(play.tell(died(1, arrived=2, steps=1, picks=1))) == [Save]
    last = max(g.round for g in play.of(Grant) if isinstance(g, Grant))
    for number in range(3, last + 1):
        play.round(number, picks=number - 1, who=(0,))
    assert play.end() is None
    save = play.of(Save)[-1]
    assert isinstance(save, Save)
    file = SavedFile("model.safetensors", 1, "x")
    (publish,) = play.tell(PartSaved(Rank(0), Row(0), save.save, (file,)))
    assert isinstance(publish, Publish)
    assert publish.meta.save_reason == "max_failure_exceeded"
    assert play.end() is None
    play.tell(Published(save.save, "ckpt/model-1"))
    assert play.end() == End(
        "failed", 4, "1 of 2 ranks are missing, at most 0 may be: rank 1 (signal 9)"
    )


def test_a_breach_ends_with_its_grace_whatever_is_saved() -> None:
    play = Play(Survival(max_failures=0, grace_s=5)).train()
    play.tell(died(1))
    assert play.mind.next_at == play.now + 5 * S
    play.tell(Tick(), after_s=4)
    assert play.end() is None
    play.tell(Tick(), after_s=2)
    assert play.end() == End("failed", 4, str(play.mind._breach and play.mind._breach.reason))


def test_before_there_is_anything_to_save_a_breach_ends_it_at_once() -> None:
    play = Play(Survival(on_death="abort"))
    play.tell(ready(0), died(1))
    assert play.end() == End("failed", 4, "rank 1 (signal 9) lost, and --on-death is abort")


def test_a_death_after_somebody_has_stopped_the_run_is_no_breach() -> None:
    play = Play(Survival(max_failures=0)).train()
    play.tell(Stop(1, "SIGINT"), died(1))
    assert play.mind._breach is None


# ---- who comes back ------------------------------------------------------------------------------


def back_to_attached(play: Play, row: int = 2) -> list[Action]:
    """Rank 1 has died; its next incarnation comes as far as it can before the next edge."""
    assert kinds(play.tell(Tick(), after_s=0.2)) == [Spawn]
    said = play.tell(ready(1, row))
    assert kinds(said) == [Attach]
    return said + play.tell(attached(1, row))


def test_a_dead_rank_joins_the_next_round_and_trains_from_the_one_after() -> None:
    play = Play(Survival(restarts=1)).train()
    play.round(2, picks=1)
    issued = max(g.round for g in play.of(Grant) if isinstance(g, Grant))
    play.tell(died(1, arrived=2, steps=1, picks=1))
    said = back_to_attached(play)
    (attach,) = [a for a in said if isinstance(a, Attach)]
    assert (attach.slot, attach.global_step) == (1, 2)
    assert {(s.rank, s.row) for s in attach.seats} == {(0, 0), (1, 2)}
    for number in range(3, issued + 1):
        play.round(number, picks=number - 1, who=(0,))
    (joined,) = play.of(Rejoined)
    assert joined == Rejoined(
        Rank(1), Row(2), 1, Round(issued + 1), "rank 1 is back as incarnation 1 in row 2"
    )
    grants = [g for g in play.of(Grant) if isinstance(g, Grant) and g.rank == 1]
    first = next(g for g in grants if g.round == issued + 1)
    assert (first.planned, first.spans, first.global_step) == (0, (), 2 + issued - 2)
    assert [(s.rank, s.joiner) for s in first.roster] == [(0, False), (1, True)]
    after = next(g for g in grants if g.round == issued + 2)
    assert (after.planned, after.global_step, after.after) == (1, None, 0)
    assert [(s.rank, s.row, s.joiner) for s in after.roster] == [(0, 0, False), (1, 2, False)]


def test_while_a_rank_is_on_its_way_back_no_round_is_dealt_ahead() -> None:
    """Or the one that takes it in would come a window later."""

    def issued_after_a_death(survival: Survival) -> int:
        play = Play(survival, ranks=3).train()
        rounds = play.mind._course().rounds
        before = rounds.newest
        play.tell(died(2))
        play.round(2, picks=1, who=(0, 1))
        return rounds.newest - before

    assert issued_after_a_death(Survival()) == 1
    assert issued_after_a_death(Survival(restarts=1)) == 0


def test_a_slot_is_given_away_when_the_last_round_that_used_it_has_closed() -> None:
    play = Play(Survival(restarts=1)).train()
    play.tell(arrived(1, 2, 1, 1), died(1, arrived=2, steps=1, picks=1))
    play.tell(Tick(), after_s=0.2)
    assert kinds(play.tell(ready(1, 2))) == []
    assert Attach not in kinds(play.tell(arrived(0, 2, 1, 1)))
    assert Attach in kinds(play.tell(left(0, 2, 0, 1)))


def test_another_model_cannot_come_back() -> None:
    play = Play(Survival(restarts=2)).train()
    play.tell(died(1), Tick(), after_s=0.2)
    said = play.tell(ready(1, 2, digest="other"))
    assert kinds(said) == [Kill]
    assert any(
        isinstance(a, Note) and "rank 1 cannot come back: model layout" in a.text for a in said
    )
    assert kinds(play.tell(died(1, 2), Tick(), after_s=60)) == []


def test_a_script_that_fails_costs_only_its_rank_while_it_may_come_back() -> None:
    play = Play(Survival(restarts=1)).train()
    assert play.mind.forgives(failed(1))
    play.tell(failed(1))
    assert play.end() is None
    back_to_attached(play)
    last = max(g.round for g in play.of(Grant) if isinstance(g, Grant))
    for number in range(2, last + 1):
        play.round(number, picks=number - 1, who=(0,))
    assert play.of(Rejoined)
    assert not play.mind.forgives(failed(1, 2))
    play.tell(failed(1, 2))
    assert play.end() == End("failed", 1, "rank 1 failed: ValueError: x")


def test_a_rank_that_is_refused_or_is_the_last_one_is_not_forgiven() -> None:
    play = Play(Survival(restarts=1)).train()
    assert not play.mind.forgives(failed(1, exit_code=2))
    play.tell(died(1))
    assert not play.mind.forgives(failed(0))
    play.tell(failed(0))
    assert play.end() == End("failed", 1, "rank 0 failed: ValueError: x")


def test_a_newcomer_that_fails_on_its_way_ends_nothing() -> None:
    play = Play(Survival(restarts=1)).train()
    play.tell(died(1), Tick(), after_s=0.2)
    assert play.mind.forgives(failed(1, 2))
    assert kinds(play.tell(failed(1, 2))) == []
    assert play.end() is None


def test_who_is_ready_in_time_begins_with_the_others() -> None:
    play = Play(Survival(restarts=1))
    play.tell(died(1), Tick(), after_s=0.2)
    said = play.tell(ready(1, 2), ready(0))
    assert kinds(said)[-2:] == [Attach, Attach]
    assert play.mind.living == {0: 0, 1: 2}


def test_a_rank_that_came_back_in_the_scripts_run_before_is_in_its_row() -> None:
    play = Play(Survival())
    said = play.tell(died(1), Present(Rank(1), Row(5)), ready(0))
    assert [a.row for a in said if isinstance(a, Rejoined)] == [5]
    assert play.mind.phase == "forming"
    play.tell(ready(1, 5))
    assert play.mind.living == {0: 0, 1: 5}
    assert play.mind.phase == "attaching"


def test_a_stopping_run_sends_newcomers_home() -> None:
    play = Play(Survival(restarts=1)).train()
    play.tell(died(1), Tick(), after_s=0.2)
    assert Kill(Rank(1), Row(2), "the run is ending") in play.tell(Stop(1, "SIGTERM"))
    assert kinds(play.tell(died(1, 2))) == []


def test_a_rank_that_has_left_its_training_lives_on_and_is_not_replaced() -> None:
    play = Play(Survival(restarts=1)).train()
    play.tell(Quit(Rank(1), Row(1), "over"), died(1, cause="left the training: over"))
    assert play.mind.next_at is None


def test_the_run_is_lost_with_the_last_rank_that_holds_the_model() -> None:
    play = Play(Survival(restarts=1)).train()
    play.tell(died(1))
    back_to_attached(play)
    last = max(g.round for g in play.of(Grant) if isinstance(g, Grant))
    for number in range(2, last + 1):
        play.round(number, picks=number - 1, who=(0,))
    assert play.of(Rejoined)
    play.tell(arrived(1, last + 1, 0, 0, row=2))
    play.tell(died(0, arrived=last, steps=1, picks=last - 1))
    assert play.end() == End("failed", 4, "every rank that held the model is lost")


def test_a_living_rank_lends_its_optimizer() -> None:
    play = Play(Survival(restarts=1, rejoin_optimizer="peer"), ranks=3).train()
    play.tell(died(2), Tick(), after_s=0.2)
    assert play.tell(ready(2, 3))[-1] == Lend(Rank(0), Row(3))
    assert Lend(Rank(1), Row(3)) in play.tell(died(0))
    said = play.tell(Lent(Rank(1), Row(1), Row(3)))
    assert [a.loan_of for a in said if isinstance(a, Attach)] == [1]


def test_without_a_loan_the_optimizer_is_fresh() -> None:
    play = Play(Survival(restarts=1, rejoin_optimizer="peer")).train()
    play.tell(died(1), Tick(), after_s=0.2)
    play.tell(ready(1, 2))
    said = play.tell(Lent(Rank(0), Row(0), Row(2), "no space left"))
    assert [a.loan_of for a in said if isinstance(a, Attach)] == [None]
    assert any(isinstance(a, Note) and "fresh optimizer: no space left" in a.text for a in said)
