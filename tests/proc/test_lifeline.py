"""The lifeline is cut by its one holder's end and by nothing else."""

from __future__ import annotations

import os
import threading

from flodl_shm.proc.lifeline import Lifeline, close_launcher_descriptors, is_cut, watch


def test_cutting_it_is_seen_once():
    line = Lifeline()
    assert not is_cut(line.read_fd)
    cut = threading.Event()
    thread = watch(line.read_fd, cut.set)
    assert not cut.is_set()
    line.cut()
    assert cut.wait(5)
    thread.join(5)
    assert is_cut(line.read_fd)
    line.close()
    line.close()


def test_a_child_that_drops_its_copy_does_not_hold_it():
    line = Lifeline()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        close_launcher_descriptors()
        os.read(read, 1)  # live until the test is done
        os._exit(0)
    os.close(read)
    line.cut()
    assert is_cut(line.read_fd, timeout_ms=5000)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    line.close()
