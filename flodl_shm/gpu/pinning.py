"""Registers the arena with the CUDA driver, so that copies to and from it run at full speed.

Registered memory moves at the link's speed, the same memory unregistered at a third to a fifth
of it. It is done once per process, on the mapping itself: registering is slow, and a mapping that
is unmapped while registered poisons its addresses for a later one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

PORTABLE = 1  # cudaHostRegisterPortable: valid in every context of this process


class Runtime(Protocol):
    """The part of torch.cuda.cudart() that is used; both return an error code, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any: ...
    def cudaHostUnregister(self, address: int) -> Any: ...


def pin(runtime: Runtime, address: int, size: int) -> tuple[Callable[[], None] | None, str]:
    """Register `size` bytes at `address`; how to undo it, and a reason if it could not be done.

    Not being able to is no failure: copies work, only slower, and the caller says so.
    """
    if size <= 0:
        return None, "nothing to register"  # the driver fails on it, and only at a later call
    error = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if error:
        return None, (
            f"the arena of {size} bytes could not be pinned (CUDA error {error}), so copies are "
            "slower; a low limit of locked memory is the usual cause (ulimit -l)"
        )
    return lambda: _unpin(runtime, address), ""


def _unpin(runtime: Runtime, address: int) -> None:
    runtime.cudaHostUnregister(address)
