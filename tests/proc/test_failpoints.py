"""Faults on purpose: only with the very token, only what was asked for, each counted."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank
from flodl_shm.proc import failpoints
from flodl_shm.proc.failpoints import Injected, arm, hit, hit_in_reduce

SECRET = "0123456789abcdef0123"


@pytest.fixture
def environ(tmp_path):
    """All three variables, for whatever spec."""
    (tmp_path / "token").write_text(SECRET + "\n")

    def of(spec):
        return {
            "FLODL_FAILPOINTS": spec,
            "FLODL_FAILPOINTS_DIR": str(tmp_path),
            "FLODL_FAILPOINTS_TOKEN": SECRET,
        }

    yield of
    failpoints.disarm()


def hits(tmp_path):
    file = tmp_path / "hits"
    return file.read_text().splitlines() if file.exists() else []


def test_without_a_spec_nothing_is_armed():
    arm({}, rank=Rank(0))
    assert not failpoints.ARMED
    hit("start")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda env: env.pop("FLODL_FAILPOINTS_TOKEN"),
        lambda env: env.pop("FLODL_FAILPOINTS_DIR"),
        lambda env: env.update(FLODL_FAILPOINTS_TOKEN="0123456789abcdef9999"),
        lambda env: env.update(FLODL_FAILPOINTS_TOKEN=""),
        lambda env: env.update(FLODL_FAILPOINTS_DIR=""),
        lambda env: env.update(FLODL_FAILPOINTS_DIR="/proc/self"),
    ],
)
def test_a_spec_without_its_token_is_refused(environ, spoil):
    env = environ("start:do=kill")
    spoil(env)
    with pytest.raises(BadConfig, match=r"breaks runs on purpose.*Unset FLODL_FAILPOINTS"):
        arm(env, rank=None)
    assert not failpoints.ARMED


def test_a_token_that_could_be_guessed_is_refused(environ, tmp_path):
    (tmp_path / "token").write_text("x")
    env = environ("start:do=kill") | {"FLODL_FAILPOINTS_TOKEN": "x"}
    with pytest.raises(BadConfig, match="no directory with a token"):
        arm(env, rank=None)


@pytest.mark.parametrize(
    "part",
    [
        "nowhere:do=kill",
        "start",
        "start:do=dance",
        "start:do=delay",
        "start:do=kill=9",
        "start:do=delay=soon",
        "start:nth=0:do=kill",
        "start:nth=x:do=kill",
        "start:when=now:do=kill",
    ],
)
def test_what_cannot_be_injected_is_refused(environ, part):
    with pytest.raises(BadConfig, match=f"'{part}' is no injection"):
        arm(environ(part), rank=None)


def test_it_fires_at_the_nth_time_once_and_is_counted(environ, tmp_path):
    arm(environ("mid_batch:rank=1:nth=3:do=raise"), rank=Rank(1))
    for _ in range(2):
        hit("mid_batch")
    hit("start")
    assert hits(tmp_path) == []
    with pytest.raises(Injected, match="injected at mid_batch"):
        hit("mid_batch")
    hit("mid_batch")
    assert hits(tmp_path) == [f"mid_batch:rank=1:nth=3:do=raise in 1 pid {os.getpid()}"]


def test_a_later_incarnation_is_spared_and_times_counts_over_all_of_them(environ, tmp_path):
    env = environ("start:rank=1:times=2:do=raise")
    for _ in range(2):
        arm(env, rank=Rank(1))
        with pytest.raises(Injected):
            hit("start")
    arm(env, rank=Rank(1))
    hit("start")
    assert len(hits(tmp_path)) == 2


def test_others_are_spared_and_everybody_means_each_rank(environ, tmp_path):
    arm(environ("start:rank=1:do=raise"), rank=Rank(0))
    hit("start")
    arm(environ("start:rank=launcher:do=raise"), rank=Rank(0))
    hit("start")
    for rank in (None, Rank(0), Rank(1)):
        arm(environ("start:do=raise"), rank=rank)
        with pytest.raises(Injected):
            hit("start")
    assert [line.split(" in ")[1].split()[0] for line in hits(tmp_path)] == ["launcher", "0", "1"]


def test_a_full_disk_is_an_oserror_and_several_injections_stand_side_by_side(environ):
    arm(environ("save.fsync:rank=0:do=enospc; save.write:times=0:do=delay=0"), rank=Rank(0))
    for _ in range(3):
        hit("save.write")
    with pytest.raises(OSError, match="No space left") as caught:
        hit("save.fsync")
    assert caught.value.errno == errno.ENOSPC


def test_the_points_of_a_reduce_have_names_here(environ, tmp_path):
    arm(environ("redo_valid:do=raise"), rank=Rank(0))
    hit_in_reduce("copied", 0, 0, 0, None)
    with pytest.raises(Injected):
        hit_in_reduce("valid", 0, 0, 0, None)
    assert set(failpoints.IN_A_REDUCE.values()) <= set(failpoints.PLACES)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("do", "ended"),
    [("kill", lambda s: os.WTERMSIG(s) == signal.SIGKILL), ("exit=7", os.WIFEXITED)],
)
def test_a_process_that_goes_has_been_counted(environ, tmp_path, do, ended):
    env = environ(f"exit:do={do}")
    pid = os.fork()
    if pid == 0:
        try:
            arm(env, rank=Rank(3))
            hit("exit")
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert ended(status)
    assert status
    assert hits(tmp_path) == [f"exit:do={do} in 3 pid {pid}"]


@pytest.mark.procs
def test_a_process_that_stops_can_be_continued(environ, tmp_path):
    env = environ("exit:do=stop")
    pid = os.fork()
    if pid == 0:
        try:
            arm(env, rank=Rank(3))
            hit("exit")
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0
