"""Pinning against a driver that counts; the real one needs a GPU."""

from __future__ import annotations

from flodl_shm.gpu.pinning import PORTABLE, pin


class Driver:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = (size, flags)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_the_whole_mapping_is_registered_and_given_back() -> None:
    driver = Driver()
    undo, why = pin(driver, 4096, 1 << 20)
    assert driver.registered == {4096: (1 << 20, PORTABLE)}
    assert undo is not None
    assert why == ""
    undo()
    assert driver.registered == {}


def test_a_refusal_names_the_size_and_the_usual_cause() -> None:
    undo, why = pin(Driver(error=2), 4096, 1 << 20)
    assert undo is None
    assert "1048576 bytes" in why
    assert "CUDA error 2" in why
    assert "ulimit -l" in why


def test_an_empty_mapping_is_not_offered_to_the_driver() -> None:
    driver = Driver()
    assert pin(driver, 4096, 0) == (None, "nothing to register")
    assert driver.registered == {}
