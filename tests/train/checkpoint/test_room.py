"""Whether the place will do is known before the training starts, in one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from flodl_shm.errors import BadConfig, HostUnfit
from flodl_shm.train.checkpoint.room import check_writable, room_for


def test_the_folder_is_made_and_nothing_else(stem):
    check_writable(stem)
    check_writable(stem)
    assert list(stem.parent.iterdir()) == []


@pytest.mark.parametrize("stem", ["/", "..", "a/..", "a\nb"])
def test_what_cannot_be_a_prefix_is_refused(stem):
    with pytest.raises(BadConfig, match="is no prefix of checkpoint names"):
        check_writable(Path(stem))


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadConfig, match=r"runs is not a directory"):
        check_writable(tmp_path / "runs" / "ckpt" / "model")


def test_a_name_too_long_is_refused(tmp_path):
    with pytest.raises(HostUnfit, match="File name too long"):
        check_writable(tmp_path / ("m" * 250))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_what_the_system_refuses_is_said_in_its_words(stem, monkeypatch, code):
    def refuse(path, *_more):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(HostUnfit, match=os.strerror(code)):
        check_writable(stem)


def test_too_little_room_is_a_warning_with_both_numbers(stem, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=1024 * 1024))
    assert room_for(stem, 10 * 1024 * 1024) == ""
    text = room_for(stem, 25 * 1024 * 1024)
    assert "need about 25 MiB, 10 MiB are free in" in text
    assert str(stem.parents[1]) in text


def test_a_disk_that_does_not_say_is_a_warning(stem, monkeypatch):
    def refuse(path):
        raise OSError(errno.ENOSYS, "Function not implemented", str(path))

    monkeypatch.setattr(os, "statvfs", refuse)
    assert "Function not implemented" in room_for(stem, 1)


@pytest.mark.procs
def test_a_read_only_mount_is_refused(mounted):
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(HostUnfit, match="Read-only file system"):
        check_writable(mounted / "ckpt" / "model")
