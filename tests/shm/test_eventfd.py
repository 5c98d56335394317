"""The launcher's descriptor: readable after a notify, from any process, however many."""

from __future__ import annotations

import os
import select

import pytest

from flodl_shm.shm.eventfd import Wakeup


@pytest.fixture
def wakeup():
    made = Wakeup()
    yield made
    made.close()


def is_readable(wakeup: Wakeup, timeout_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(wakeup.fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def test_it_is_readable_from_notify_until_drain(wakeup):
    assert not is_readable(wakeup)
    wakeup.notify()
    wakeup.notify()
    assert is_readable(wakeup)
    assert wakeup.drain()
    assert not is_readable(wakeup)
    assert not wakeup.drain()


def test_a_child_wakes_the_parent(wakeup, children):
    child = children.fork(wakeup.notify)
    assert is_readable(wakeup, timeout_ms=10_000)
    assert children.join(child) == 0


def test_a_full_counter_does_not_block_a_rank(wakeup):
    os.eventfd_write(wakeup.fd, 2**64 - 2)
    wakeup.notify()
    assert wakeup.drain()


def test_closing_twice_is_harmless():
    wakeup = Wakeup()
    wakeup.close()
    wakeup.close()
    assert wakeup.fd == -1
