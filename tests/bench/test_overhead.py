"""bench-overhead: both loops train the same steps, and a row is the median of differences."""

from __future__ import annotations

import json

import pytest
import torch

from flodl_shm.bench import overhead
from flodl_shm.bench.overhead import BLOCK, BareLoop, EngineLoop, Pair, line_of, row_of, task_of


def test_a_row_is_the_median_of_the_differences():
    pairs = [Pair(0.3 * BLOCK, 0.1 * BLOCK), Pair(0.5 * BLOCK, 0.4 * BLOCK), Pair(BLOCK, BLOCK)]
    row = row_of("linear", pairs)
    assert row == {
        "workload": "linear",
        "us_per_step": pytest.approx(1e5),
        "engine_us": pytest.approx(5e5),
        "bare_us": pytest.approx(4e5),
    }
    assert line_of(row).split() == ["linear", "100000.0", "500000.0", "400000.0"]


def test_both_loops_do_the_same_steps():
    task = task_of("linear")
    bare, engine = BareLoop(task), EngineLoop(task)
    try:
        order = task.order(seed=3)
        bare.run(order)
        engine.run(order)
        assert engine._runner.steps == BLOCK
        # The engine's model lies in the arena, and its progress in the cells of its row.
        weight = bare._model.weight.detach()
        torch.testing.assert_close(engine._replica.state()["weight"], weight)
        assert not torch.equal(weight, task.model.weight)
        assert engine._runner.meeting.pace_of(0)[1] == BLOCK
    finally:
        engine.close()


def test_a_small_dataset_is_gone_through_again():
    task = task_of("linear")
    small = overhead.TensorDataset(*(tensor[:10] for tensor in task.dataset.tensors))
    order = overhead.Task(
        task.model, task.make_optimizer, task.train_step, small, task.batch_size
    ).order(seed=0)
    assert len(order) == BLOCK * task.batch_size
    assert sorted(order[:10]) == list(range(10))


def test_the_file_is_written_and_missing_data_left_out(tmp_path, monkeypatch, capsys):
    def no_data(name):
        raise overhead.BadConfig("the digits workloads need scikit-learn")

    monkeypatch.setattr(overhead, "build", no_data)
    monkeypatch.setattr(overhead, "QUICK", overhead.Effort(1, ("linear", "digits-mlp")))
    threads = torch.get_num_threads()
    assert overhead.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    assert torch.get_num_threads() == threads
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["workload"] for row in rows] == ["linear"]
    assert "digits-mlp left out" in capsys.readouterr().out
