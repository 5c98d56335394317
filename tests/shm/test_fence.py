"""The fence is there in every process and never blocks."""

from __future__ import annotations

import os
import threading

from flodl_shm.shm import fence as module
from flodl_shm.shm.fence import fence, order


class Lock:
    """Notes every crossing, which its acquire begins."""

    def __init__(self, crossings) -> None:
        self.acquire = lambda: crossings.append(1)

    def release(self) -> None:
        pass


def test_one_crossing_on_x86_and_two_elsewhere(monkeypatch):
    crossings = []
    monkeypatch.setattr(module, "allocate_lock", lambda: Lock(crossings))
    for strong, expected in ((True, [1]), (False, [1, 1])):
        monkeypatch.setattr(module, "STRONG_ORDER", strong)
        crossings.clear()
        fence()
        assert crossings == expected


def test_order_is_free_where_the_processor_keeps_it(monkeypatch):
    crossings = []
    monkeypatch.setattr(module, "allocate_lock", lambda: Lock(crossings))
    monkeypatch.setattr(module, "STRONG_ORDER", True)
    order()
    assert crossings == []
    monkeypatch.setattr(module, "STRONG_ORDER", False)
    order()
    assert crossings == [1, 1]


def test_a_child_forked_while_another_thread_fences_can_fence(children):
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            fence()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(10):
            assert children.join(children.fork(fence)) == 0
    finally:
        stop.set()
        thread.join(timeout=5)
    assert os.getpid()
