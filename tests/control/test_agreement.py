"""Checksums of one round must be one, whenever they come."""

from __future__ import annotations

import pytest

from flodl_shm.control.agreement import KEPT, Agreement
from flodl_shm.control.messages import Left
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank, Round, Row


def left(rank, number, digest):
    return Left(Rank(rank), Row(rank), Round(number), (Rank(0), Rank(1)), digest=digest)


def test_equal_ones_and_none_are_fine():
    agreement = Agreement()
    for number in range(1, 3 * KEPT):
        for rank in range(3):
            agreement.left(left(rank, number, number * 17))
    agreement.left(left(0, 99, None))
    agreement.left(left(1, 99, 5))


def test_another_names_ranks_round_and_both():
    agreement = Agreement()
    agreement.left(left(0, 4, 0xAB))
    agreement.left(left(2, 4, 0xAB))
    agreement.left(left(0, 5, 0xCD))
    with pytest.raises(WeBroke) as caught:
        agreement.left(left(1, 4, 0xAC))
    assert str(caught.value).startswith(
        "after round 4 rank 0 and rank 1 hold different parameters: checksums 000000ab and 000000ac"
    )
    assert caught.value.exit_code == 70
