"""A death record says who died of what; writing it never costs anything."""

from __future__ import annotations

import json

import pytest

from flodl_shm.control.messages import Died
from flodl_shm.engine.death_record import cause_class, write_death
from flodl_shm.engine.watch import NO_HEARTBEAT, NO_PROGRESS
from flodl_shm.ids import Rank, Row


def write(stem, rank=1, **more):
    told = {"error": "KeyError: 'x'", "cause": "exception", "unix_time_s": 1700000000.9}
    return write_death(stem, rank=Rank(rank), world_size=3, **(told | more))


def test_the_record_is_as_others_read_it(tmp_path):
    assert write(tmp_path / "ckpt" / "model") == ""
    assert json.loads((tmp_path / "ckpt" / "model.rank1.death.json").read_text()) == {
        "schema_version": 1,
        "rank": 1,
        "world_size": 3,
        "error": "KeyError: 'x'",
        "cause": "exception",
        "unix_time_secs": 1700000000,
    }


def test_ranks_have_files_of_their_own_and_a_later_death_replaces(tmp_path):
    for rank, error in ((0, "a"), (1, "b"), (0, "c")):
        write(tmp_path / "model", rank, error=error)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.rank0.death.json",
        "model.rank1.death.json",
    ]
    assert json.loads((tmp_path / "model.rank0.death.json").read_text())["error"] == "c"


def test_any_text_can_be_told(tmp_path):
    assert write(tmp_path / "model", error="\udc80" + "x" * 100_000) == ""
    told = json.loads((tmp_path / "model.rank1.death.json").read_text())
    assert told["error"].startswith("\\udc80xxx")


def test_what_the_disk_refuses_is_answered_not_raised(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in write(tmp_path / "file" / "model")
    (tmp_path / "model.rank1.death.json").mkdir()
    assert "Is a directory" in write(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model.rank1.death.json"]


@pytest.mark.parametrize(
    ("cause", "facts", "kind"),
    [
        ("KeyError: 'x' (train.py:3)", {"user_error": True}, "exception"),
        (
            f"signal 9, killed by the launcher: {NO_PROGRESS} for 300 s in data",
            {},
            "hang",
        ),
        (f"signal 9, killed by the launcher: {NO_HEARTBEAT} for 5.1 s", {}, "hang"),
        ("left the training: KeyError", {}, "quit"),
        ("signal 11 (SIGSEGV)", {}, "signal"),
        ("exit 0", {}, "exit"),
        ("ended, status unknown", {}, "killed"),
    ],
)
def test_the_kind_of_an_end_is_known_by_its_words(cause, facts, kind):
    assert cause_class(Died(Rank(1), Row(1), cause, **facts)) == kind
