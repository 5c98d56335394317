"""Options shared by the whole suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seeds", type=int, default=2000, help="simulated runs (default 2000)")
    parser.addoption("--sim-seed", type=int, default=None, help="one simulated run to replay")
    parser.addoption("--cycles", type=int, default=50, help="starts and stops (soak: 2500)")
