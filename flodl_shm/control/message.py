"""What every message is made of, and the two values that many of them carry."""

from __future__ import annotations

import msgspec

from flodl_shm.ids import Rank, Row, Slot

Span = tuple[int, int]  # positions [start, stop) in an epoch's permutation


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base of all; `type` in the encoded form is the class name."""


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place in a round: its cells and the memory of its replica."""

    rank: Rank
    row: Row
    slot: Slot
    joiner: bool = False  # receives the consensus, contributes nothing
