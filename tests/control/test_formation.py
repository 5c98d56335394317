"""Ranks that built different things are told the first difference."""

from __future__ import annotations

from typing import Any

import pytest

from flodl_shm.control.formation import Formation
from flodl_shm.control.messages import Attached, Ready
from flodl_shm.control.options import Wishes
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank, Row


def ready(rank: int, **changes: Any) -> Ready:
    facts = {"digest": "abc", "params": 8, "buffers": 0, "samples": 64, "device": "cpu"}
    return Ready(Rank(rank), Row(rank), **{**facts, **changes})


def formed(*reports: Ready) -> list[Ready] | None:
    formation = Formation(2)
    for report in reports:
        formation.ready(report)
    return formation.agreed([Rank(0), Rank(1)])


def test_waits_for_all_living() -> None:
    formation = Formation(2)
    formation.check_came(["exit 0", "signal 9"])
    with pytest.raises(BadConfig, match="every rank ended without training"):
        formation.check_came(["exit 0"])
    formation.ready(ready(1))
    formation.check_came(["exit 0"])
    assert formation.agreed([Rank(0), Rank(1)]) is None
    assert formation.agreed([Rank(1)]) == [ready(1)]


def test_attached_of_all_living() -> None:
    formation = Formation(2)
    formation.attached(Attached(Rank(0), Row(0)))
    assert formation.all_attached([Rank(0)])
    assert not formation.all_attached([Rank(0), Rank(1)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "x", "names": ("param a 3 float32",)}, "param a 2 float32 on one, param a 3"),
        ({"digest": "x", "names": ("param a 2 float32", "param b")}, "nothing on one, param b"),
        ({"digest": "x", "names": ("param a 2 float32",)}, "model layout abc on one, x on"),
        ({"samples": 65}, "64 samples on one, 65 on the other"),
        ({"wishes": Wishes(epochs=3)}, "called with epochs=None on one, epochs=3 on the other"),
        ({"callbacks": ("epoch",)}, "given no functions on one, epoch on the other"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], words: str) -> None:
    mine = ready(0, names=("param a 2 float32",))
    theirs = ready(1, **{"names": ("param a 2 float32",), **changes})
    with pytest.raises(BadConfig, match=f"ranks 0 and 1 differ: .*{words}"):
        formed(mine, theirs)


def test_equal_reports_agree() -> None:
    assert formed(ready(0), ready(1)) == [ready(0), ready(1)]
