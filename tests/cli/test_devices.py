from __future__ import annotations

import pytest

from flodl_shm.cli.devices import choose_devices
from flodl_shm.errors import BadConfig, HostUnfit
from flodl_shm.gpu import inventory
from flodl_shm.gpu.inventory import count_visible, torch_has_cuda, usable_cuda_devices


@pytest.mark.parametrize(
    ("ranks", "devices", "gpus", "expected"),
    [
        (None, None, 0, "cpu cpu"),
        ("auto", None, 0, "cpu cpu"),
        (None, None, 3, "cuda:0 cuda:1 cuda:2"),
        ("auto", None, 1, "cuda:0"),
        ("gpu", None, 2, "cuda:0 cuda:1"),
        ("cpu", None, 2, "cpu cpu cpu cpu"),
        ("2", None, 2, "cuda:0 cuda:1"),
        ("3", None, 2, "cpu cpu cpu"),
        (None, "cuda:0, cpu", 1, "cuda:0 cpu"),
        ("2", "cuda:1,cuda:1", 2, "cuda:1 cuda:1"),
    ],
)
def test_devices(ranks, devices, gpus, expected):
    assert " ".join(choose_devices(ranks, devices, gpus=gpus, cores=4)) == expected


@pytest.mark.parametrize(
    ("ranks", "devices", "error", "words"),
    [
        ("gpu", None, HostUnfit, "no CUDA device"),
        (None, "cuda:0", HostUnfit, "names cuda:0, but torch could use 0"),
        ("3", "cpu", BadConfig, "--devices names 1"),
        ("gpu", "cpu", BadConfig, "exclude each other"),
        (None, "GPU-1a,cpu", BadConfig, "by its UUID"),
        ("1000000", None, BadConfig, "between 1 and 256"),
    ],
)
def test_devices_that_cannot_be(ranks, devices, error, words):
    with pytest.raises(error, match=words):
        choose_devices(ranks, devices, gpus=0, cores=4)


@pytest.mark.parametrize(
    ("value", "count"),
    [("", 0), ("0", 1), ("0,2", 2), ("1,-1,2", 1), ("GPU-a,MIG-b", 2), ("none", 0)],
)
def test_entries_of_cuda_visible_devices(value, count):
    assert count_visible(value) == count


def test_no_device_is_usable_with_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(inventory, "torch_has_cuda", lambda: False)
    monkeypatch.setattr(inventory, "_nvml_devices", lambda: 4)
    assert usable_cuda_devices(None) == 0


@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("0,1", 2), ("", 0), ("0,1,2,3,4", 4)])
def test_what_is_visible_limits_what_is_there(monkeypatch, visible, count):
    monkeypatch.setattr(inventory, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(inventory, "_nvml_devices", lambda: 4)
    assert usable_cuda_devices(visible) == count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\n", True),
        ('cuda = "12.6"\n', True),
        ("", False),
    ],
)
def test_a_torch_built_with_cuda_is_told_by_its_version_file(monkeypatch, tmp_path, text, expected):
    (tmp_path / "version.py").write_text(text)

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(inventory, "find_spec", lambda _: Spec)
    assert torch_has_cuda() is expected


def test_no_torch_no_cuda(monkeypatch, tmp_path):
    class Spec:
        origin = str(tmp_path / "gone" / "__init__.py")

    monkeypatch.setattr(inventory, "find_spec", lambda _: None)
    assert not torch_has_cuda()
    monkeypatch.setattr(inventory, "find_spec", lambda _: Spec)
    assert not torch_has_cuda()
