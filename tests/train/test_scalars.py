"""record_scalar: a mean per name and window, of any thread, and nothing outside of a training."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from flodl_shm.errors import BadConfig
from flodl_shm.train import scalars
from flodl_shm.train.scalars import MOST_NAMES, MOST_WAITING, Scalars


@pytest.fixture
def notes():
    made = Scalars()
    made.start()
    return made


def test_a_window_has_the_sum_and_count_of_each_name(notes):
    for value in (1.0, 2.5):
        notes.record("acc", value)
    notes.record("norm", 3)
    assert notes.take() == {"acc": (3.5, 2), "norm": (3.0, 1)}
    assert notes.take() == {}
    notes.record("acc", 1.0)
    assert notes.take() == {"acc": (1.0, 1)}


@pytest.mark.parametrize(
    "value",
    [2, True + 1, np.float32(2), np.int64(2), np.array(2.0), torch.tensor(2), torch.tensor(2.0)],
)
def test_what_is_one_number_is_noted(notes, value):
    notes.record("x", value)
    assert notes.take() == {"x": (2.0, 1)}


def test_a_tensor_is_noted_as_it_was_then_and_without_its_graph(notes):
    weight = torch.tensor(1.0, requires_grad=True)
    running = (weight * 2).detach()
    notes.record("x", weight * 2)
    notes.record("x", running)
    running += 100
    assert notes.take() == {"x": (4.0, 2)}


def test_numbers_of_another_device_are_read_together_and_only_at_the_end(notes, monkeypatch):
    """A CPU tensor on the list, as one of a GPU would be."""
    monkeypatch.setattr(scalars, "_checked", lambda name, value: value.double())
    notes.record("x", torch.tensor(1.0))
    notes.record("y", 5.0)
    notes.record("x", torch.tensor(float("nan")))
    notes.record("x", torch.tensor(3.0))
    assert all(isinstance(value, torch.Tensor) for name, value in notes._notes if name == "x")
    with pytest.warns(RuntimeWarning, match="got nan for 'x'"):
        assert notes.take() == {"x": (4.0, 2), "y": (5.0, 1)}


def test_values_that_are_not_finite_are_left_out_counted_and_said_once(notes):
    for value in (1.0, float("nan"), float("inf")):
        notes.record("x", value)
    with pytest.warns(RuntimeWarning, match="record_scalar got nan for 'x'") as told:
        assert notes.take() == {"x": (1.0, 1)}
    assert len(told) == 1
    notes.record("x", float("-inf"))
    assert notes.take() == {}
    assert notes.left_out == {"x": 3}


def test_a_sum_stays_finite(notes):
    notes.record("x", 1.7e308)
    notes.record("x", 1.7e308)
    with pytest.warns(RuntimeWarning, match="such values are in no mean"):
        assert notes.take() == {"x": (1.7e308, 1)}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("", 1.0, "got the name ''"),
        (3, 1.0, "got the name 3"),
        ([], 1.0, r"got the name \[\]"),
        ("n" * 129, 1.0, "a name of 129 characters"),
        ("x", "1", "got str for 'x'"),
        ("x", None, "got NoneType for 'x'"),
        ("x", 10**400, "got int for 'x'"),
        ("x", np.ones(2), "got ndarray for 'x'"),
        ("x", torch.ones(2), r"float32 of shape \(2,\) for 'x'"),
        ("x", torch.tensor(1j), "complex64 of shape"),
    ],
)
def test_what_cannot_be_noted_is_refused(notes, name, value, words):
    with pytest.raises(BadConfig, match=words):
        notes.record(name, value)
    assert notes.take() == {}


def test_one_name_too_many_is_refused_and_the_others_go_on(notes):
    for number in range(MOST_NAMES):
        notes.record(f"x{number}", 1.0)
    with pytest.raises(BadConfig, match="more than 1000 names, 'step 7' is one too many"):
        notes.record("step 7", 1.0)
    notes.take()
    notes.record("x0", 2.0)  # names are counted over the training, not over a window
    assert notes.take() == {"x0": (2.0, 1)}
    with pytest.raises(BadConfig, match="one too many"):
        notes.record("step 8", 1.0)


def test_a_name_may_be_a_kind_of_text(notes):
    class Name(str):
        __slots__ = ()

    notes.record(Name("x"), 1.0)
    notes.record("x", 1.0)
    assert notes.take() == {"x": (2.0, 2)}


def test_outside_of_a_training_nothing_is_noted_not_even_nonsense():
    notes = Scalars()
    notes.record("x", 1.0)
    notes.record([], "nonsense")
    notes.start()
    assert notes.take() == {}
    notes.record("x", 1.0)
    notes.stop()
    notes.record("x", 1.0)
    notes.start()
    assert notes.take() == {}


def test_a_training_inside_of_another_ends_only_itself():
    notes = Scalars()
    notes.start()
    notes.record("x", 1.0)
    notes.start()
    notes.stop()
    assert notes.take() == {"x": (1.0, 1)}
    notes.stop()
    notes.stop()  # one too many is no harm
    notes.start()
    notes.record("x", 1.0)
    assert notes.take() == {"x": (1.0, 1)}


def test_many_notes_do_not_pile_up(notes):
    for _ in range(MOST_WAITING + 10):
        notes.record("x", 1.0)
    assert len(notes._notes) < 10
    with notes._adding:  # another thread is at it
        for _ in range(MOST_WAITING + 10):
            notes.record("x", 1.0)
    assert notes.take() == {"x": (2.0 * (MOST_WAITING + 10), 2 * (MOST_WAITING + 10))}


def test_threads_lose_no_note(notes):
    def note():
        for _ in range(20_000):
            notes.record("x", 1.0)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    count = 0
    while any(thread.is_alive() for thread in threads):
        count += notes.take().get("x", (0, 0))[1]
    count += notes.take().get("x", (0, 0))[1]
    assert count == 80_000


@pytest.mark.procs
def test_a_forked_child_notes_nothing_and_its_parent_goes_on():
    scalars.start()
    try:
        scalars.record_scalar("x", 1.0)
        with scalars._SCALARS._adding:  # held by nobody who lives on in the child
            child = os.fork()
            if not child:
                scalars.record_scalar("x", 1.0)
                os._exit(len(scalars.take()))
        assert os.waitpid(child, 0)[1] == 0
        assert scalars.take() == {"x": (1.0, 1)}
    finally:
        scalars.stop()
