"""Free memory is the least of the host's and every container's above us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flodl_shm.shm import free_memory
from flodl_shm.shm.free_memory import UNLIMITED, largest_files, survey

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    return tmp_path / "proc"


def limit_v2(group: Path, maximum: str, current: int, inactive: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_without_limits_the_host_bounds(proc, tmp_path):
    found = survey(proc, tmp_path / "none")
    assert (found.memory, found.bound) == (4 * MIB, "the host")


def test_a_limit_above_the_own_cgroup_counts(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("0::/pod/job\n")
    limit_v2(tmp_path / "cg" / "pod", str(3 * MIB), 2 * MIB)
    limit_v2(tmp_path / "cg" / "pod" / "job", "max", MIB)
    found = survey(proc, tmp_path / "cg")
    assert (found.memory, found.bound) == (MIB, "the memory limit of cgroup /pod")


def test_page_cache_does_not_count_as_used(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("0::/job\n")
    limit_v2(tmp_path / "cg" / "job", str(3 * MIB), 3 * MIB, inactive=2 * MIB)
    assert survey(proc, tmp_path / "cg").memory == 2 * MIB


def test_a_version_1_hierarchy_is_read_too(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/job\n")
    group = tmp_path / "cg" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{2 * MIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{MIB}\n")
    (group / "memory.stat").write_text(f"total_inactive_file {MIB // 2}\n")
    assert survey(proc, tmp_path / "cg").memory == MIB + MIB // 2


def test_inside_a_container_the_root_is_the_own_group(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("0::/hidden/from/here\n")
    limit_v2(tmp_path / "cg", str(2 * MIB), MIB)
    assert survey(proc, tmp_path / "cg").memory == MIB


def test_over_the_limit_is_no_negative_room(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("0::/\n")
    limit_v2(tmp_path / "cg", str(MIB), 2 * MIB)
    assert survey(proc, tmp_path / "cg").memory == 0


def test_junk_and_absence_do_not_bound(tmp_path):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable:\n")
    (proc / "self" / "cgroup").write_text("junk\n0::/\n")
    assert survey(proc, tmp_path / "cg").memory == UNLIMITED


def test_this_machine_has_memory_and_a_missing_mount_has_none(monkeypatch, tmp_path):
    assert survey().memory > 0
    monkeypatch.setattr(free_memory, "SHM", tmp_path / "missing")
    assert survey().shm == 0


def test_the_largest_files_come_first(tmp_path):
    for name, size in (("a", 5000), ("b", 900_000), ("c", 100_000), ("d", 20_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert [name for name, _ in largest_files(tmp_path, 2)] == ["b", "c"]
    assert largest_files(tmp_path / "missing") == []
