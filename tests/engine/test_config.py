"""Rules of RunConfig that the command line's own types would catch first, or that it never asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flodl_shm.control.options import Wishes
from flodl_shm.engine.config import RunConfig, Slow, flag
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank


def config(**changes):
    given = {"ranks": 2, "devices": ("cpu", "cpu"), "workload": "char-gpt", **changes}
    return RunConfig(**given)


def test_the_title_is_what_runs():
    assert config().title == "char-gpt"
    assert config(workload=None, script=Path("a/train.py")).title == "train.py"
    assert config(workload=None, module="pkg.train").title == "pkg.train"


def test_slow_downs_of_a_rank_come_in_the_order_of_their_epochs():
    late, early, other = Slow(Rank(1), 3, 2), Slow(Rank(1), 2), Slow(Rank(0), 1)
    assert config(slow=(late, other, early)).slow_of(Rank(1)) == (early, late)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": None}, "asked to run nothing"),
        ({"script": Path("x")}, "asked to run a script and --workload"),
        ({"script_args": ("a",)}, "takes no arguments"),
        ({"ranks": 3}, "3 ranks but 2 devices"),
        ({"ranks": 0, "devices": ()}, "between 1 and"),
        ({"backend": "nccl"}, "not available"),
        ({"wishes": Wishes(policy="async")}, "async"),
        ({"progress": "film"}, "--progress film"),
        ({"show_ranks": "1"}, "--show-ranks 1"),
        ({"workload": "paced", "workload_options": {"step_ms": 3.0}}, "1 entries for 2 ranks"),
        ({"workload": "paced", "workload_options": {"colour": 3}}, "--colour has no effect"),
        ({"dead_after_s": float("nan")}, "--dead-after nan"),
        ({"name": ""}, "--name ''"),
        ({"name": ".."}, "--name '..'"),
        ({"name": "x" * 65}, "cannot be part"),
    ],
)
def test_what_cannot_hold_is_refused(changes, words):
    with pytest.raises(BadConfig, match=words):
        config(**changes)


@pytest.mark.parametrize(("rank", "factor", "epoch"), [(-1, 2, 0), (0, 0.9, 0), (0, 2, -1)])
def test_slow_downs_that_cannot_be(rank, factor, epoch):
    with pytest.raises(BadConfig):
        Slow(Rank(rank), factor, epoch)


def test_flag_is_the_spelling_of_the_command_line():
    assert flag("max_grad_norm") == "--max-grad-norm"
