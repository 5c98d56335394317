"""Samples of CUDA devices, from a stand-in for NVML: this machine need not have any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flodl_shm.gpu.usage import GpuSample, open_watch

MIB = 2**20


class Nvml:
    """Two devices; the second knows neither its power nor how busy it is."""

    class NVMLError(Exception):
        pass

    def __init__(self, works=True):
        self.works, self.open = works, 0

    def _check(self, fine):
        if not fine:
            raise self.NVMLError

    def nvmlInit(self):
        self._check(self.works)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        self._check(index < 2)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check(uuid in ("GPU-0", "GPU-1"))
        return int(uuid[-1])

    def nvmlDeviceGetName(self, handle):
        return f"Card {handle}"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._check(handle == 0)
        return SimpleNamespace(gpu=87, memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(handle + 1) * 100 * MIB, total=8000 * MIB, free=0)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._check(handle == 0)
        return 123_400


def test_what_a_device_says():
    nvml = Nvml()
    watch = open_watch(("cuda:0", "cpu", "cuda:1", "cuda:0"), None, nvml)
    assert watch.sample() == [
        GpuSample("cuda:0", "Card 0", "GPU-0", 0.87, 100.0, 8000.0, 123.4),
        GpuSample("cuda:1", "Card 1", "GPU-1", None, 200.0, 8000.0, None),
    ]
    watch.close()
    watch.close()
    assert nvml.open == 0
    assert watch.sample() == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Card 0", "Card 1"]),
        ("0,1", ["Card 0", "Card 1"]),
        ("1, 0", ["Card 1", "Card 0"]),
        ("GPU-1", ["Card 1"]),  # cuda:1 is not there: its rank says so
        ("7,GPU-0", ["Card 0"]),
        ("x", []),
        ("", []),
    ],
)
def test_devices_are_those_that_cuda_shows(visible, names):
    watch = open_watch(("cuda:0", "cuda:1"), visible, Nvml())
    assert [sample.name for sample in watch.sample()] == names


def test_without_cuda_ranks_or_without_a_driver_there_is_none():
    assert open_watch(("cpu", "cpu"), None, Nvml(works=False)) is None
    assert open_watch(("cuda:0",), None, Nvml(works=False)) is None
    real = open_watch(("cuda:0",), None)
    if real is not None:
        real.close()
