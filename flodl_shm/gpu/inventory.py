"""How many CUDA devices this machine could train on, asked without torch and without CUDA.

NVML opens no CUDA context, so the launcher may call it before it forks. Which device is how fast
is not known here.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def usable_cuda_devices(visible: str | None) -> int:
    """Devices that torch in this interpreter could use; 0 where anything for it is missing.

    `visible` is CUDA_VISIBLE_DEVICES as it stands, None if it is not set.
    """
    if not torch_has_cuda():
        return 0
    present = _nvml_devices()
    return present if visible is None else min(present, count_visible(visible))


def count_visible(value: str) -> int:
    """Entries of CUDA_VISIBLE_DEVICES that count: CUDA stops at the first it cannot read."""
    count = 0
    for entry in value.split(","):
        word = entry.strip()
        if not (word.isdigit() or word.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def torch_has_cuda() -> bool:
    """True if the installed torch was built with CUDA: read, since importing it takes a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


def _nvml_devices() -> int:
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver: the usual state of a machine without a GPU
        return 0
