"""The stand-in for a GPU: its data, its options, its pace."""

from __future__ import annotations

import pytest
import torch

from flodl_shm import Trainer, workloads
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank, Row
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.pacing import jitter
from flodl_shm.train.solo import LoneSession
from flodl_shm.workloads import paced


def test_options_set_the_picks_and_the_times():
    arguments = workloads.build("paced", picks=30, step_ms=(5.0, 10.0))
    assert len(arguments["dataset"]) == 30
    assert arguments["step_ms"] == (5.0, 10.0)
    assert arguments["batch_size"] == 1


def test_by_default_each_rank_is_half_as_fast_as_the_one_before():
    assert workloads.build("paced")["step_ms"][:3] == (20, 40, 80)


@pytest.mark.parametrize("picks", [0, -1, 2.5, True, "9"])
def test_picks_are_a_whole_number(picks):
    with pytest.raises(BadConfig, match="picks is"):
        workloads.build("paced", picks=picks)


def test_the_data_are_always_the_same():
    assert torch.equal(paced.make_data(5).tensors[1], paced.make_data(5).tensors[1])


def test_each_step_is_padded_to_its_drawn_time():
    """On a clock that moves only in sleep, the sleeps are the drawn times themselves."""
    now, slept = [0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += round(seconds * 1e9)

    job = Trainer(**workloads.build("paced", picks=40, step_ms=(20.0,))).job
    session = LoneSession("cpu")
    assert (session.rank, session.row) == (Rank(0), Row(0))
    state = GpuWorker(job, session, clock=lambda: now[0], sleep=sleep).run()
    assert slept == pytest.approx([0.020 * jitter(0, 0, step) for step in range(40)], abs=1e-6)
    assert state.evaluation < 0
