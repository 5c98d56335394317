"""Who calls the epoch function, what waits for it, and the rate it sets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flodl_shm.control.epoch_function import EpochFunction
from flodl_shm.control.messages import AdjustRate, CallbackRan, CallEpochFn, Note
from flodl_shm.control.roles import Roles
from flodl_shm.errors import PeerBroke
from flodl_shm.ids import Rank, Row

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from edges import meta_of

BOTH = {Rank(0): Row(0), Rank(1): Row(1)}
ONE = {Rank(1): Row(1)}


def fastest() -> Rank:
    return Rank(0)


def ran(rank: int, epoch: int, **more: object) -> CallbackRan:
    return CallbackRan(Rank(rank), Row(rank), "epoch", epoch, **more)  # type: ignore[arg-type]


def asked(policy: str = "fastest") -> EpochFunction:
    function = EpochFunction(Roles(policy, ("epoch",)))
    orders = list(function.ask(3, BOTH, fastest))
    assert orders[-1] == CallEpochFn(Rank(0), 3)
    assert function.caller == 0
    return function


def test_without_a_function_nothing_is_waited_for() -> None:
    function = EpochFunction(Roles("fastest", ()))
    assert list(function.ask(0, BOTH, fastest)) == []
    assert function.caller is None


def test_the_rate_it_wants_is_everybodys_and_stays_until_it_wants_another() -> None:
    function = asked()
    assert list(function.ran(ran(0, 3, lr=0.1), BOTH)) == [
        AdjustRate(rank, 0.1, 1.0) for rank in BOTH
    ]
    assert function.caller is None
    list(function.ask(4, BOTH, fastest))
    assert list(function.ran(ran(0, 4), BOTH)) == []
    assert (function.lr, function.scale) == (0.1, 1.0)
    list(function.ask(5, BOTH, fastest))
    assert list(function.ran(ran(0, 5, lr=0.2), ONE)) == [AdjustRate(Rank(1), 0.2, 1.0)]


def test_factors_of_several_epochs_multiply_and_a_rate_of_its_own_replaces_them() -> None:
    function = asked()
    wanted = [{"lr_scale": 0.5}, {"lr_scale": 0.5}, {"lr_scale": 4.0}, {"lr": 0.1, "lr_scale": 0.5}]
    told = []
    for epoch, one in enumerate([*wanted, {"lr_scale": 0.5}, {"lr": 0.3}], start=3):
        told += list(function.ran(ran(0, epoch, **one), ONE))
        list(function.ask(epoch + 1, BOTH, fastest))
    rates = [(order.lr, order.scale) for order in told if isinstance(order, AdjustRate)]
    back = (None, 1.0)  # told, though it is the schedule's own again
    assert rates == [(None, 0.5), (None, 0.25), back, (0.1, 0.5), (0.1, 0.25), (0.3, 1.0)]


def test_a_checkpoint_before_an_epochs_first_reduce_has_the_rate_before_its_function() -> None:
    function = asked()
    list(function.ran(ran(0, 3, lr_scale=0.5), BOTH))
    assert function.rate_of({2}) == (None, 1.0)
    assert function.rate_of({2, 3}) == (None, 0.5)
    list(function.ask(4, BOTH, fastest))
    list(function.renew(ONE, lambda: Rank(1)))
    list(function.ran(ran(1, 4, lr_scale=0.5), ONE))
    assert function.rate_of({2, 3}) == (None, 0.5)
    assert function.rate_of({2, 3, 4}) == (None, 0.25)
    assert EpochFunction(Roles("fastest", ()), meta_of(lr=0.2)).rate_of(()) == (0.2, 1.0)


def test_a_resumed_training_goes_on_at_the_rate_it_had() -> None:
    function = EpochFunction(Roles("fastest", ("epoch",)), meta_of(lr=0.2, lr_scale=1.0))
    assert list(function.tell(BOTH)) == [AdjustRate(rank, 0.2, 1.0) for rank in BOTH]
    assert list(EpochFunction(Roles("fastest", ())).tell(BOTH)) == []


def test_the_next_holder_is_asked_if_the_caller_dies_in_it() -> None:
    function = asked()
    assert list(function.renew(BOTH, fastest)) == []
    orders = list(function.renew(ONE, lambda: Rank(1)))
    assert orders[-1] == CallEpochFn(Rank(1), 3)
    assert list(function.ran(ran(1, 3), ONE)) == []


def test_nobody_else_is_asked_for_a_named_rank() -> None:
    function = asked("0")
    (note,) = function.renew(ONE, fastest)
    assert isinstance(note, Note)
    assert note.alert
    assert function.caller is None
    assert list(function.ask(4, ONE, fastest)) == []


def test_an_error_in_it_is_told_and_holds_nothing_up() -> None:
    function = asked()
    (note,) = function.ran(ran(0, 3, error="ValueError: no (train.py:3)"), BOTH)
    assert isinstance(note, Note)
    assert note.alert
    assert note.text == "the epoch function failed in epoch 3: ValueError: no (train.py:3)"
    assert function.caller is None


@pytest.mark.parametrize("report", [ran(1, 3), ran(0, 2)])
def test_a_report_nobody_asked_for_is_a_broken_peer(report: CallbackRan) -> None:
    with pytest.raises(PeerBroke, match="unasked"):
        list(asked().ran(report, BOTH))
