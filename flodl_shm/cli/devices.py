"""Which device each rank gets, from --ranks and --devices and what the machine has."""

from __future__ import annotations

import re

from flodl_shm.cli.options import not_here
from flodl_shm.cli.values import parse_whole
from flodl_shm.engine.config import MAX_RANKS
from flodl_shm.errors import BadConfig, HostUnfit

CPU_RANKS = 2  # of --ranks auto without a GPU: the least that can disagree
UUID = re.compile(r"(GPU|MIG)-.+")
CUDA = re.compile(r"cuda:(\d+)")


def choose_devices(
    ranks: str | None, devices: str | None, *, gpus: int, cores: int
) -> tuple[str, ...]:
    """One device per rank. `gpus` and `cores` are what is usable here.

    Raises BadConfig on words that cannot be, HostUnfit on devices that are not here.
    """
    if devices is not None:
        return _named(ranks, devices, gpus)
    if ranks in (None, "auto"):
        return _cuda(gpus) or ("cpu",) * CPU_RANKS
    if ranks == "gpu":
        if not gpus:
            raise HostUnfit(
                "--ranks gpu: there is no CUDA device that torch could use here",
                hint="Use --ranks cpu or a number.",
            )
        return _cuda(gpus)
    if ranks == "cpu":
        return ("cpu",) * cores
    count = _count(ranks)
    # All alike, unless --devices says otherwise: a mixed rig should be meant.
    return _cuda(count) if count <= gpus else ("cpu",) * count


def _named(ranks: str | None, devices: str, gpus: int) -> tuple[str, ...]:
    if ranks in ("gpu", "cpu"):
        raise BadConfig(f"--ranks {ranks} and --devices {devices} exclude each other")
    words = tuple(word.strip() for word in devices.split(","))
    for word in words:
        match = CUDA.fullmatch(word)
        if UUID.fullmatch(word):
            raise not_here(f"--devices {word}, a device by its UUID,", "Name it as cuda:N.")
        if match and int(match[1]) >= gpus:
            raise HostUnfit(
                f"--devices names {word}, but torch could use {gpus} CUDA devices here",
                hint="cpu is always there.",
            )
    if ranks not in (None, "auto") and _count(ranks) != len(words):
        raise BadConfig(f"--ranks {ranks} but --devices names {len(words)}: {devices}")
    return words


def _count(ranks: str | None) -> int:
    count = parse_whole(ranks or "", "--ranks", "Give a number, or auto, gpu or cpu.")
    if not 1 <= count <= MAX_RANKS:
        raise BadConfig(f"--ranks {count}: between 1 and {MAX_RANKS} ranks can run")
    return count


def _cuda(count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(count))
