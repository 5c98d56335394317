"""Who holds a file's lock lives; a path that was replaced meanwhile is another file."""

from __future__ import annotations

import os

import pytest

from flodl_shm.shm.file_lock import is_same_file, try_flock


@pytest.fixture
def opened(tmp_path):
    """Opens a file as often as asked, each time on its own."""
    fds = []

    def open_one(name="one"):
        fds.append(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
        return fds[-1]

    yield open_one
    for fd in fds:
        os.close(fd)


def test_one_holder_at_a_time_and_nobody_waits(opened):
    first, second = opened(), opened()
    assert try_flock(first)
    assert try_flock(first)
    assert not try_flock(second)
    assert try_flock(opened("two"))


def test_a_file_that_was_replaced_or_removed_is_another_one(opened, tmp_path):
    fd, path = opened(), tmp_path / "one"
    assert is_same_file(fd, path)
    path.rename(tmp_path / "old")
    assert not is_same_file(fd, path)
    opened()
    assert not is_same_file(fd, path)
    assert is_same_file(fd, tmp_path / "old")
