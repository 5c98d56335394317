"""One intra-op thread: models this small only lose by more, most of all on a shared machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Whatever GPUs there are: run() under plain python launches no ranks here."""
    monkeypatch.setenv("FLODL_RANKS", "1")
