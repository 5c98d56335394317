"""Every message crosses the ring as itself, and strangers are refused."""

from __future__ import annotations

import typing

import msgspec
import pytest

from flodl_shm.control import messages
from flodl_shm.control.messages import Message, Order, Report, decode_order, decode_report, encode
from flodl_shm.control.options import Settled, Wishes
from flodl_shm.ids import Rank, Row, Slot

SEAT = messages.Seat(Rank(1), Row(2), Slot(1))
PLAN = Settled(
    policy="sync",
    world_size=2,
    epochs=1,
    batch_sizes=(4, 4),
    seed=0,
    tail="drop",
    samples=9,
    anchor=10,
    max_anchor=100,
    overhead_target=0.05,
    gamma=1.0,
    augment=1,
    eval_every=0,
)
VALUES: dict[str, object] = {
    "plan": PLAN,
    "roster": (SEAT,),
    "seats": (SEAT,),
    "spans": ((0, 4), (8, 12)),
    "contributors": (0, 1),
    "wishes": Wishes(epochs=2),
    "names": ("a", "b"),
    "value": None,
    "files": (messages.SavedFile("a", 3, "x"),),
    "callbacks": ("epoch",),
    "state_of": None,
    "lr": 0.5,
}


def sample(kind: type[Message]) -> Message:
    """One of its kind, every field filled but those of tuples and dicts that may be empty."""
    filled = {}
    for field in msgspec.structs.fields(kind):
        made = {int: 3, float: 0.5, str: "x", bool: True}
        base = field.type if field.type in made else getattr(field.type, "__supertype__", None)
        if field.name in VALUES or base in made:
            filled[field.name] = VALUES.get(field.name, made.get(base))
        elif field.required:
            filled[field.name] = None
    return kind(**filled)


@pytest.mark.parametrize("kind", typing.get_args(Report), ids=lambda kind: kind.__name__)
def test_a_report_comes_through(kind: type[Message]) -> None:
    assert decode_report(encode(sample(kind))) == sample(kind)


@pytest.mark.parametrize("kind", typing.get_args(Order), ids=lambda kind: kind.__name__)
def test_an_order_comes_through(kind: type[Message]) -> None:
    assert decode_order(encode(sample(kind))) == sample(kind)


@pytest.mark.parametrize("kind", typing.get_args(Report), ids=lambda kind: kind.__name__)
def test_any_cut_of_a_report_is_refused(kind: type[Message]) -> None:
    body = encode(sample(kind))
    for stop in range(len(body)):
        with pytest.raises(msgspec.MsgspecError):
            decode_report(body[:stop])


def test_a_report_is_no_order() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_order(encode(sample(messages.Left)))
    with pytest.raises(msgspec.ValidationError):
        decode_report(encode(sample(messages.Grant)))
