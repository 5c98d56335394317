"""What scripts are told of an epoch, when, and who calls the metrics function."""

from __future__ import annotations

import sys
from pathlib import Path

from flodl_shm.control.epoch_news import KEPT, EpochNews
from flodl_shm.control.messages import Arrived, EpochClosed, EpochMetrics
from flodl_shm.control.roles import Roles
from flodl_shm.control.schedule import Schedule
from flodl_shm.ids import Nanos, Rank, Round, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import meta_of, plan_of

LIVING = {Rank(1): Row(1), Rank(2): Row(2)}


def closed(epoch: int) -> EpochClosed:
    return EpochClosed(
        epoch=epoch, picks=9, done_once=9, duplicated=0, missing=0, dropped=0, loss=0.5
    )


def news(schedule: Schedule | None = None, *, on_rank: bool = True) -> EpochNews:
    plan = plan_of(3, metrics_on_rank=on_rank)
    roles = Roles("fastest", ("metrics",))
    return EpochNews(plan, roles, schedule or Schedule(plan), ("cpu", "cpu", "cuda:0"))


def briefly(told: list[EpochMetrics]) -> list[tuple[object, ...]]:
    return [(t.rank, t.picks, t.value, t.calls, t.closed) for t in told]


def test_a_closed_epoch_is_told_to_the_living_and_called_by_the_lowest() -> None:
    schedule = Schedule(plan_of(3))
    schedule.open_next()
    report = Arrived(Rank(1), Row(1), Round(2), 3, 3, 6, busy_ns=6, data_ns=0)
    schedule.tallies[0].issued(Nanos(1_000_000))
    schedule.tallies[0].arrived(report, 6, Nanos(2_000_000))
    told = list(news(schedule).closed(closed(0), LIVING, Nanos(5_000_000)))
    assert briefly(told) == [(1, 9, None, True, True), (2, 9, None, False, True)]
    assert told[0].rank_picks == (0, 6, 0)
    assert told[0].epoch_ms == 4.0
    assert told[0].devices == ("cpu", "cpu", "cuda:0")
    assert schedule.tallies == {}


def test_its_value_is_told_with_the_same_figures() -> None:
    desk = news()
    first = list(desk.closed(closed(0), LIVING, Nanos(5)))
    second = list(desk.scored(0, 0.25, LIVING, Nanos(9)))
    assert briefly(second) == [(1, 9, 0.25, True, True), (2, 9, 0.25, False, True)]
    assert second[0].epoch_ms == first[0].epoch_ms


def test_the_launcher_calls_where_it_is_told_to() -> None:
    told = list(news(on_rank=False).closed(closed(0), LIVING, Nanos(5)))
    assert not any(one.calls for one in told)


def test_an_epoch_under_way_is_told_with_what_there_is_of_it_and_calls_nobody() -> None:
    schedule = Schedule(plan_of(3))
    pool = schedule.open_next().pool
    pool.take(Rank(1), 5)
    pool.consume(Rank(1), 4, round=Round(2))
    pool.commit(Round(2))
    told = list(news(schedule).scored(0, 0.5, LIVING, Nanos(9)))
    assert briefly(told) == [(1, 4, 0.5, False, False), (2, 4, 0.5, False, False)]
    assert 0 in schedule.tallies


def test_an_epoch_of_before_a_resume_is_told_with_the_bare_facts() -> None:
    plan = plan_of(3)
    schedule = Schedule(plan, meta_of(epoch=3, epochs=3, closed_epochs=(closed(2),)))
    told = list(news(schedule).scored(2, 0.5, LIVING, Nanos(9)))
    assert briefly(told) == [(1, 9, 0.5, True, True), (2, 9, 0.5, False, True)]
    assert told[0].epoch_ms == 0


def test_figures_of_old_epochs_are_not_kept_for_ever() -> None:
    plan = plan_of(3)
    schedule = Schedule(plan, meta_of(closed_epochs=tuple(map(closed, range(9)))))
    desk = news(schedule)
    for epoch in range(KEPT + 1):
        list(desk.closed(closed(epoch), LIVING, Nanos(5)))
    assert briefly(list(desk.scored(0, 0.5, LIVING, Nanos(9))))[0] == (1, 9, 0.5, True, True)
