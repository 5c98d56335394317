"""What the CUDA devices of a run are doing, asked of NVML, which opens no CUDA context.

A device is found by its place in CUDA_VISIBLE_DEVICES, or by its UUID there. CUDA may number
devices of different make otherwise than NVML does, unless CUDA_DEVICE_ORDER is PCI_BUS_ID: so
each sample carries the device's name and UUID. Whatever cannot be read is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One device at one moment."""

    device: str  # as the run names it
    name: str
    uuid: str
    busy: float | None  # part of the last moments in which a kernel ran, 0 .. 1
    used_mib: float | None
    total_mib: float | None
    power_w: float | None


class GpuWatch:
    """Holds NVML open for some devices. Made by `open_watch`."""

    def __init__(self, nvml: Any, handles: dict[str, Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._open = True
        self._facts = {
            device: (
                str(self._ask(nvml.nvmlDeviceGetName, handle) or ""),
                str(self._ask(nvml.nvmlDeviceGetUUID, handle) or ""),
            )
            for device, handle in handles.items()
        }

    def sample(self) -> list[GpuSample]:
        """All devices now."""
        return [self._sample(device, handle) for device, handle in self._handles.items()]

    def close(self) -> None:
        """Let NVML go; twice is harmless."""
        if self._open:
            self._open = False
            self._handles = {}
            self._ask(self._nvml.nvmlShutdown)

    def _sample(self, device: str, handle: Any) -> GpuSample:
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        name, uuid = self._facts[device]
        return GpuSample(
            device=device,
            name=name,
            uuid=uuid,
            busy=None if busy is None else busy.gpu / 100,
            used_mib=None if memory is None else round(memory.used / MIB, 1),
            total_mib=None if memory is None else round(memory.total / MIB, 1),
            power_w=None if power is None else power / 1000,
        )

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """The answer; None if the driver has none: not every device knows its power."""
        try:
            return question(*about)
        except self._nvml.NVMLError:
            return None


def open_watch(devices: Iterable[str], visible: str | None, nvml: Any = None) -> GpuWatch | None:
    """Watch the CUDA devices among `devices`; None without any, or without NVML.

    `visible` is CUDA_VISIBLE_DEVICES as it stands, None if it is not set.
    """
    wanted = sorted({device for device in devices if device.startswith("cuda:")})
    if not wanted:
        return None
    driver = nvml or _nvml()
    if driver is None:
        return None
    try:
        driver.nvmlInit()
    except driver.NVMLError:  # no driver
        return None
    handles = {}
    for device in wanted:
        try:
            handles[device] = _handle(driver, int(device.removeprefix("cuda:")), visible)
        except (driver.NVMLError, IndexError, ValueError):
            continue  # the rank finds out for itself, and says it better
    return GpuWatch(driver, handles)


def _handle(nvml: Any, index: int, visible: str | None) -> Any:
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    entry = visible.split(",")[index].strip()
    if entry.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    return nvml.nvmlDeviceGetHandleByIndex(int(entry))


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
