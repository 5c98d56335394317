"""Looks at real processes, with a made-up clock: how often, how dear, and on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from flodl_shm.engine import sampler as sampling
from flodl_shm.engine.sampler import EVERY_NS, Sampler
from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.resources import Resources

S = 1_000_000_000


@pytest.fixture
def children():
    """Two processes that only wait."""
    started = [subprocess.Popen(["/bin/sleep", "60"]) for _ in range(2)]
    yield [SimpleNamespace(rank=Rank(n), pid=child.pid) for n, child in enumerate(started)]
    for child in started:
        child.kill()
        child.wait(10)


@pytest.fixture
def recorder():
    warnings = []
    tally = SimpleNamespace(facts=SimpleNamespace(started_at=Nanos(0)), picks=5)
    return SimpleNamespace(
        tally=tally, resources=Resources(), say=warnings.append, warnings=warnings
    )


@pytest.fixture
def sampler(tmp_path, recorder, monkeypatch):
    # A look takes what it takes; the clock of these tests is made up, so a look is free here.
    monkeypatch.setattr(sampling, "THRIFT", 0)
    host = SimpleNamespace(
        record=SimpleNamespace(resources=tmp_path / "resources.jsonl"),
        config=SimpleNamespace(devices=("cpu", "cpu"), visible_devices=None),
    )
    sampler = Sampler(host, recorder)
    yield sampler
    sampler.close()


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "resources.jsonl").read_text().splitlines()]


def test_a_look_every_half_second(sampler, children, recorder, tmp_path):
    for ms in range(0, 3000, 100):
        sampler.tick(children, Nanos(ms * 1_000_000))
    told = lines(tmp_path)
    assert [line["at_s"] for line in told] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert told[0]["picks"] == 5
    assert [rank["pid"] for rank in told[0]["ranks"]] == [child.pid for child in children]
    assert (told[0]["ranks"][0]["cpu"], told[1]["ranks"][0]["cpu"]) == (None, 0.0)
    assert told[0]["launcher"]["rss_mib"] > 1
    assert recorder.resources.ranks[Rank(1)].rss_peak_mib > 0


def test_memory_is_read_seldom_and_one_rank_at_a_time(sampler, children, recorder, tmp_path):
    for turn in range(60):
        sampler.tick(children, Nanos(turn * EVERY_NS))
    read = [
        (line["at_s"], rank["rank"])
        for line in lines(tmp_path)
        for rank in line["ranks"]
        if "pss_mib" in rank
    ]
    assert read == [(2.0, 0), (2.5, 1), (12.0, 0), (12.5, 1), (22.0, 0), (22.5, 1)]
    use = recorder.resources.ranks[Rank(1)]
    assert use.rss_mib >= use.pss_mib > 0
    assert use.pss_mib >= use.private_mib > 0


def test_a_stopped_rank_is_not_asked_for_its_pages(sampler, children, tmp_path):
    os.kill(children[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, children[0].pid, os.WSTOPPED | os.WNOWAIT)
    for turn in range(10):
        sampler.tick(children, Nanos(turn * EVERY_NS))
    told = lines(tmp_path)
    assert {line["ranks"][0]["state"] for line in told} == {"T"}
    assert not any("pss_mib" in line["ranks"][0] for line in told)
    assert any("pss_mib" in line["ranks"][1] for line in told)


def test_a_rank_that_is_gone_is_left_out(sampler, children, tmp_path):
    gone = SimpleNamespace(rank=Rank(2), pid=2**22 + 1)
    sampler.tick([*children, gone], Nanos(0))
    assert [rank["rank"] for rank in lines(tmp_path)[0]["ranks"]] == [0, 1]


def test_a_dear_look_puts_the_next_one_off(sampler, children, monkeypatch, tmp_path):
    monkeypatch.setattr(sampling, "THRIFT", 200)
    cost = iter(range(0, 10 * S, 5_000_000))  # 5 ms between two readings of this clock
    monkeypatch.setattr(sampling.time, "thread_time_ns", lambda: next(cost))
    for turn in range(5):
        sampler.tick(children, Nanos(turn * EVERY_NS))
    assert [line["at_s"] for line in lines(tmp_path)] == [0, 1, 2]


def test_a_full_disk_is_told_once_and_sums_go_on(sampler, children, recorder):
    sampler._file.close()
    with open("/dev/full", "ab", buffering=0) as full:
        sampler._file._file = full
        for turn in range(4):
            sampler.tick(children, Nanos(turn * EVERY_NS))
    assert len(recorder.warnings) == 1
    assert "the training goes on" in recorder.warnings[0]
    assert recorder.resources.ranks[Rank(0)].cpu_share is not None


def test_devices_stand_beside_the_ranks(sampler, children, tmp_path):
    sample = SimpleNamespace(sample=list, close=lambda: None)
    sampler._gpus = sample
    sampler.tick(children, Nanos(0))
    assert lines(tmp_path)[0]["gpus"] == []


def test_looking_costs_less_than_one_percent_of_a_core(sampler, children, monkeypatch):
    monkeypatch.setattr(sampling, "THRIFT", 200)
    began = time.thread_time_ns()
    now = 0
    for _ in range(200):
        now = max(sampler._at, now + EVERY_NS)
        sampler.tick(children, Nanos(now))
    assert (time.thread_time_ns() - began) / now < 0.01
