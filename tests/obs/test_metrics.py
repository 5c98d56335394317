"""metrics.jsonl: what was told of each epoch, once when it closes and once with its value."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from flodl_shm.control.messages import EpochClosed, EpochMetrics, Tick
from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.metrics import EpochLines, MetricsFile

CLOSED = EpochClosed(0, 15, 15, 0, 0, 0, 1.25)
NEWS = EpochMetrics(
    Rank(0),
    0,
    1.25,
    15,
    epoch_ms=100.0,
    scalars={"acc": 0.5},
    rank_scalars=({"acc": 0.5}, {}),
    rank_loss=(1.25, None),
    rank_picks=(10, 5),
    devices=("cpu", "cpu"),
)


@pytest.fixture
def lines(feed, tmp_path):
    """Feed actions to what makes the lines; the file's lines so far are returned."""
    feed.form()
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20})
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, warn=pytest.fail)
    made = EpochLines(feed.tally, metrics.write)

    def tell(*actions, flush=False):
        for action in actions:
            made.feed(action, Nanos(feed.now))
        if flush:
            made.flush()
        return [json.loads(line) for line in path.read_text().splitlines()]

    yield tell
    metrics.close()


def to_all(news, caller=0):
    """The same for two ranks, one of which is to call the function."""
    return [msgspec.structs.replace(news, rank=Rank(r), calls=r == caller) for r in (0, 1)]


def test_an_epoch_has_one_line_with_all_that_is_told_and_where_the_run_stands(lines):
    (line,) = lines(CLOSED, *to_all(NEWS))
    fields = {one.name for one in msgspec.structs.fields(EpochMetrics)} - {"rank", "calls"}
    standing = {"at_s", "picks_total", "picks_per_s", "he", "waste", "shares", "living"}
    assert set(line) >= fields | standing
    assert (line["epoch"], line["loss"], line["picks"]) == (0, 1.25, 15)
    assert line["shares"] == {"0": 0.6667, "1": 0.3333}
    assert (line["rank_picks"], line["rank_loss"]) == ([10, 5], [1.25, None])
    assert (line["scalars"], line["rank_scalars"]) == ({"acc": 0.5}, [{"acc": 0.5}, {}])
    assert (line["value"], line["evaluated"], line["closed"]) == (None, False, True)


def test_a_second_line_has_the_value(lines):
    scored = msgspec.structs.replace(NEWS, value=0.75)
    first, second = lines(CLOSED, *to_all(NEWS), Tick(), *to_all(scored))
    assert (second["value"], second["evaluated"]) == (0.75, True)
    assert {**second, "value": None, "evaluated": False} == first


def test_a_value_that_is_nan_is_a_value(lines):
    scored = msgspec.structs.replace(NEWS, value=math.nan)
    *_, line = lines(CLOSED, *to_all(NEWS), *to_all(scored))
    assert (line["value"], line["evaluated"]) == (None, True)


def test_a_value_of_an_epoch_under_way_says_so(lines):
    (line,) = lines(*to_all(msgspec.structs.replace(NEWS, value=0.5, closed=False)))
    assert (line["value"], line["closed"]) == (0.5, False)


def test_an_epoch_that_closes_with_nobody_left_to_be_told_is_written_too(lines):
    later = msgspec.structs.replace(CLOSED, epoch=1)
    assert [line["epoch"] for line in lines(CLOSED, later)] == [0]
    assert [line["epoch"] for line in lines(flush=True)] == [0, 1]
    assert [line["epoch"] for line in lines(flush=True)] == [0, 1]


def test_metrics_says_once_that_the_disk_is_full(tmp_path):
    warnings = []
    with open("/dev/full", "ab", buffering=0) as full:
        metrics = MetricsFile(tmp_path / "metrics.jsonl", warn=warnings.append)
        metrics.close()
        metrics._file = full
        metrics.write({})
        metrics.write({})
    assert len(warnings) == 1
