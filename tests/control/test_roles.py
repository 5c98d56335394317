"""Roles stay with their holders, and move only for the reasons there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.roles import ROLES, Roles
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank

ALL = ("epoch", "evaluation", "checkpoint", "metrics")
WORLD = tuple(Rank(rank) for rank in range(4))


def is_fastest(rank):
    return lambda: Rank(rank)


def nobody_asks():
    raise AssertionError("the holder was settled; nobody should ask who is fastest")


def test_the_fastest_gets_a_role_and_keeps_it_when_another_is_faster() -> None:
    roles = Roles("fastest", ALL)
    first = roles.holder("epoch", WORLD, is_fastest(2))
    assert first == (2, "rank 2 has the epoch role: the fastest living")
    assert roles.holder("epoch", WORLD, nobody_asks) == (2, "")


def test_a_role_of_a_dead_rank_goes_to_the_fastest_that_lives() -> None:
    roles = Roles("fastest", ALL)
    roles.holder("evaluation", WORLD, is_fastest(2))
    holder, why = roles.holder("evaluation", (0, 1, 3), is_fastest(3))
    assert (holder, why) == (
        3,
        "the evaluation role goes to rank 3, the fastest living: rank 2 is dead",
    )
    assert roles.holder("evaluation", WORLD, nobody_asks) == (3, "")  # also when it comes back


def test_the_first_calibration_resolves_once_more_and_only_once() -> None:
    roles = Roles("fastest", ALL)
    for role in ROLES:
        assert roles.holder(role, WORLD, is_fastest(0))[0] == 0
    roles.recalibrated()
    assert roles.holder("epoch", WORLD, is_fastest(3)) == (
        3,
        "the epoch role goes to rank 3, the fastest living: rank 0 is slower",
    )
    assert roles.holder("checkpoint", WORLD, is_fastest(0)) == (0, "")
    roles.recalibrated()
    assert roles.holder("epoch", WORLD, nobody_asks) == (3, "")


@pytest.mark.parametrize("role", ["epoch", "evaluation"])
def test_a_named_rank_is_never_replaced_and_its_loss_is_said_once(role) -> None:
    roles = Roles("3", ALL)
    assert roles.holder(role, WORLD, nobody_asks) == (3, "")
    holder, why = roles.holder(role, WORLD[:3], nobody_asks)
    assert holder is None
    assert why == f"rank 3 is dead, and the {role} role was given to it alone: it ends"
    assert roles.holder(role, WORLD[:3], nobody_asks) == (None, "")
    assert roles.holder(role, WORLD, nobody_asks) == (3, f"rank 3 is back and has the {role} role")
    assert roles.holder(role, WORLD[:3], nobody_asks)[1] == why


def test_a_named_rank_that_failed_is_not_asked_again_on_that_occasion() -> None:
    roles = Roles("1", ALL)
    assert roles.holder("evaluation", WORLD, nobody_asks, tried=(1,)) == (None, "")
    assert roles.holder("evaluation", WORLD, nobody_asks) == (1, "")


def test_a_checkpoint_falls_to_the_lowest_living_when_the_named_rank_is_dead() -> None:
    roles = Roles("2", ())
    assert roles.holder("checkpoint", WORLD, nobody_asks) == (
        2,
        "rank 2 has the checkpoint role: it was named",
    )
    assert roles.holder("checkpoint", (1, 3), nobody_asks) == (
        1,
        "the checkpoint role goes to rank 1, the lowest living: rank 2 is dead",
    )


@pytest.mark.parametrize(("policy", "order"), [("fastest", (3, 0, 1, 2)), ("1", (1, 0, 2, 3))])
def test_a_checkpoint_is_tried_by_everybody_then_given_up(policy, order) -> None:
    roles = Roles(policy, ALL)
    tried: list[Rank] = []
    for expected in order:
        holder, why = roles.holder("checkpoint", WORLD, is_fastest(3), tried=tried)
        assert holder == expected
        assert why
        tried.append(expected)
    assert roles.holder("checkpoint", WORLD, is_fastest(3), tried=tried) == (
        None,
        "no rank is left for the checkpoint role: ranks 0, 1, 2, 3 failed",
    )
    assert roles.holder("checkpoint", WORLD, nobody_asks) == (order[-1], "")


def test_a_job_without_the_function_has_no_holder_but_for_checkpoints() -> None:
    roles = Roles("fastest", ())
    assert roles.holder("epoch", WORLD, nobody_asks) == (None, "")
    assert roles.holder("evaluation", WORLD, nobody_asks) == (None, "")
    assert roles.holder("metrics", WORLD, nobody_asks) == (None, "")
    assert roles.holder("checkpoint", WORLD, is_fastest(1))[0] == 1


def test_metrics_are_the_lowest_living_ranks() -> None:
    roles = Roles("3", ALL)
    assert roles.holder("metrics", (2, 1), nobody_asks) == (1, "")
    assert roles.holder("metrics", (), nobody_asks) == (None, "")


def test_nobody_lives_nobody_holds() -> None:
    roles = Roles("fastest", ALL)
    assert roles.holder("epoch", (), nobody_asks) == (
        None,
        "no rank is left for the epoch role: none lives",
    )


def test_an_unknown_role_is_our_bug() -> None:
    with pytest.raises(WeBroke, match="no role 'lunch'"):
        Roles("fastest", ALL).holder("lunch", WORLD, nobody_asks)


@given(
    policy=st.sampled_from(("fastest", "0", "2")),
    turns=st.lists(
        st.tuples(
            st.sampled_from(ROLES),
            st.frozensets(st.sampled_from(WORLD), min_size=1),
            st.frozensets(st.sampled_from(WORLD)),
            st.booleans(),
        )
    ),
)
def test_a_holder_lives_and_has_not_failed_and_a_move_has_a_reason(policy, turns) -> None:
    roles = Roles(policy, ALL)
    before: dict[str, Rank | None] = {}
    for role, living, tried, calibrates in turns:
        if calibrates:
            roles.recalibrated()
        holder, why = roles.holder(role, living, lambda living=living: max(living), tried=tried)
        assert holder is None or holder in living - tried
        if policy != "fastest" and role != "checkpoint":
            assert holder in (int(policy), None)
        elif holder is not None and before.get(role) != holder:
            assert why
        if holder is not None:
            before[role] = holder
