"""bench-control: rows are medians of ratios, messages come through, pinning is put back."""

from __future__ import annotations

import json
import os

import pytest

from flodl_shm.bench import control, control_channels
from flodl_shm.bench.control import CASES, Case, Effort, Rep, line_of, row_of
from flodl_shm.bench.control_channels import ARRIVED, GRANT, RingChannel
from flodl_shm.control import messages
from flodl_shm.errors import WeBroke

KEYS = {
    "case",
    "ring_us",
    "launcher_us",
    "pipe_us",
    "queue_us",
    "x_pipe",
    "x_queue",
    "msgs_x_pipe",
    "msgs_x_queue",
}
TINY = Effort(reps=2, asks=3, messages=5, idle_s=0.01)


def reps(*pairs):
    return [Rep(ask_s, flow_s) for ask_s, flow_s in pairs]


def test_a_row_has_medians_and_medians_of_the_reps_ratios():
    row = row_of(
        "pinned",
        {
            "ring": reps((1e-6, 2.0), (2e-6, 2.0), (9e-6, 2.0)),
            "launcher": reps((5e-6, 1.0), (6e-6, 1.0), (7e-6, 1.0)),
            "pipe": reps((10e-6, 8.0), (10e-6, 4.0), (10e-6, 2.0)),
            "queue": reps((10e-6, 6.0), (40e-6, 6.0), (9e-6, 6.0)),
        },
    )
    assert row == {
        "case": "pinned",
        "ring_us": pytest.approx(2.0),
        "launcher_us": pytest.approx(6.0),
        "pipe_us": pytest.approx(10.0),
        "queue_us": pytest.approx(10.0),
        "x_pipe": pytest.approx(0.2),  # time over time: below 1 is better
        "x_queue": pytest.approx(0.1),
        "msgs_x_pipe": pytest.approx(2.0),  # speed-ups: above 1 is better
        "msgs_x_queue": pytest.approx(3.0),
    }


def test_the_cases_are_the_named_ones():
    assert [case.name for case in CASES] == ["pinned", "same_core", "unpinned", "busy"]
    assert CASES[-1].burners == 2


def test_the_messages_are_real_ones():
    assert messages.decode_order(messages.encode(GRANT)) == GRANT
    assert messages.decode_report(messages.encode(ARRIVED)) == ARRIVED


def test_a_message_that_did_not_come_through_is_our_bug():
    channel = RingChannel()
    try:
        with pytest.raises(WeBroke, match="did not come through"):
            control_channels._whole(channel._reader.read())
    finally:
        channel.close()


@pytest.mark.procs
@pytest.mark.parametrize(
    "case", [Case("one core", parent=(0,), child=(0,)), Case("burning", burners=1)]
)
def test_a_case_is_measured_and_the_pinning_put_back(case):
    before = os.sched_getaffinity(0)
    row = control.run_case(case, TINY, seed=1)
    assert os.sched_getaffinity(0) == before
    assert set(row) == KEYS | {"idle_cpu"}
    assert all(value >= 0 for key, value in row.items() if key != "case")
    assert line_of(row).startswith(case.name)


@pytest.mark.procs
def test_the_file_is_written_and_a_case_without_cores_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(control, "QUICK", TINY)
    monkeypatch.setattr(control, "CASES", (Case("apart", child=(1,)), Case("unpinned")))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert control.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    finally:
        os.sched_setaffinity(0, before)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["schema"] == 1
    assert told["host"]["cores"] == 1
    assert [row["case"] for row in told["rows"]] == ["unpinned"]
    assert "apart: needs two cores" in capsys.readouterr().out
