"""Every rank finds the variables other launchers set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flodl_shm.ids import Rank
from flodl_shm.proc.environment import (
    RunFacts,
    rank_environment,
    threads_per_rank,
    usable_cores,
)

FACTS = RunFacts(world_size=3, run_id="ab12", run_dir=Path("/runs/x"), threads=4, master_port=29500)


def test_the_promised_names_are_all_there():
    assert rank_environment(Rank(2), FACTS) == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "FLODL_RUN_ID": "ab12",
        "FLODL_RUN_DIR": "/runs/x",
        "OMP_NUM_THREADS": "4",
    }


def test_a_number_of_threads_the_user_set_is_left_alone():
    facts = RunFacts(world_size=1, run_id="a", run_dir=Path("r"), threads=None, master_port=1)
    assert "OMP_NUM_THREADS" not in rank_environment(Rank(0), facts)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1), (4, 0, 4)]
)
def test_cores_are_shared_equally(cores, ranks, threads):
    assert threads_per_rank(cores, ranks) == threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "junk"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_containers_quota_counts(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))
