from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest

from flodl_shm.control.messages import Arrived, Evaluated, Left, Note, Tick
from flodl_shm.control.options import Wishes
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.journal import Header, Journal, Record, decode, read, writer_of


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", warn=pytest.fail)
    yield journal
    journal.close()


def header(journal):
    journal.header(
        run_id="r",
        started="2026-01-01T00:00:00",
        at=Nanos(5),
        versions={"a": "1"},
        world_size=3,
        flags=Wishes(epochs=2, speed_hint=(Rank(1), 2.5)),
    )


def test_what_was_written_is_read_back_as_the_same_objects(journal, tmp_path):
    arrived = Arrived(Rank(0), Row(0), Round(2), steps=3, batches=3, picks=9, loss_sum=0.1)
    header(journal)
    journal.write("event", arrived, Nanos(7))
    journal.write("action", Note("gate", "hold \u00e9"), Nanos(8))
    assert list(read(tmp_path / "journal.jsonl")) == [
        Header(
            1,
            "r",
            "2026-01-01T00:00:00",
            Nanos(5),
            {"a": "1"},
            3,
            Wishes(epochs=2, speed_hint=(Rank(1), 2.5)),
        ),
        Record("event", Nanos(7), arrived),
        Record("action", Nanos(8), Note("gate", "hold \u00e9")),
    ]


def test_every_message_of_a_run_comes_back(journal, tmp_path, feed):
    feed.form()
    feed.window({0: 2, 1: 1}, {0: 10, 1: 20})
    feed.kill(1, arrived=2, last_sign_ms_ago=1)
    feed.close(picks=3)
    feed.finish(ranks=(0,))
    header(journal)
    for message, now in feed.heard:
        journal.write("event", message, now)
    _, *records = read(tmp_path / "journal.jsonl")
    assert [(record.message, record.at) for record in records] == feed.heard


def test_a_line_is_in_the_file_when_write_returns(journal, tmp_path):
    header(journal)
    journal.write("event", Tick(), Nanos(1))
    assert (tmp_path / "journal.jsonl").read_bytes().count(b"\n") == 2


def test_a_half_line_left_by_a_kill_is_passed_over(journal, tmp_path):
    path = tmp_path / "journal.jsonl"
    header(journal)
    journal.write("event", Tick(), Nanos(1))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert len(list(read(path))) == whole[:cut].count(b"\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json\n", "no record"),
        (b'{"schema":1}\n', "no record"),
        (
            b'{"schema":9,"run_id":"","started":"","started_at":0,"versions":{}}\n',
            "schema 9, this version reads 1",
        ),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, line, words):
    path = tmp_path / "other"
    path.write_bytes(line)
    with pytest.raises(BadConfig, match=words):
        list(read(path))


def test_a_float_that_is_no_number_comes_back(journal, tmp_path):
    header(journal)
    journal.write("event", Left(Rank(0), Row(0), Round(2), (Rank(0),), divergence=math.nan), 7)
    _, record = read(tmp_path / "journal.jsonl")
    assert math.isnan(record.message.divergence)
    assert record.message.contributors == (0,)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"event","at":1,"message":{"type":"Left","rank":null}}\n',
        b'{"kind":"event","at":1,"message":null}\n',
        b'{"kind":"event","at":1,"message":{"type":"__doc__","rank":null}}\n',
        b"[]\n",
    ],
)
def test_null_elsewhere_is_no_record(journal, tmp_path, line):
    header(journal)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(BadConfig, match="line 2 is no record"):
        list(read(tmp_path / "journal.jsonl"))


@pytest.mark.procs
def test_who_writes_a_journal_can_be_asked(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = (
        "import sys, pathlib; from flodl_shm.obs.journal import Journal;"
        f"j = Journal(pathlib.Path({str(path)!r}), warn=print); print('open', flush=True);"
        "sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        writer.stdout.readline()
        assert writer_of(path) == writer.pid
        assert writer_of(path) == writer.pid  # asking takes nothing
    finally:
        writer.kill()
        writer.communicate()
    assert writer_of(path) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, None])
def test_a_score_comes_back_whatever_it_is(tmp_path, value):
    """None is a job without an evaluation: replay must tell that from a score that is nan."""
    journal = Journal(tmp_path / "journal.jsonl", warn=pytest.fail)
    journal.write("event", Evaluated(Rank(0), Row(0), epoch=1, value=value), Nanos(1))
    journal.close()
    (line,) = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    assert repr(decode(line).message.value) == repr(value)


class FullDisk(io.BytesIO):
    def __init__(self, takes):
        super().__init__()
        self.takes = takes

    def write(self, data):
        if self.takes is None:
            raise OSError(28, "No space left on device")
        return super().write(data[: self.takes])


@pytest.mark.parametrize("takes", [None, 3])
def test_a_full_disk_is_told_once_and_ends_the_journal(tmp_path, takes):
    warnings = []
    journal = Journal(tmp_path / "journal.jsonl", warn=warnings.append)
    journal.close()
    journal._file = disk = FullDisk(takes)
    for _ in range(3):
        journal.write("event", Tick(), Nanos(1))
    assert len(warnings) == 1
    assert "the training goes on" in warnings[0]
    assert len(disk.getvalue()) == (takes or 0)
