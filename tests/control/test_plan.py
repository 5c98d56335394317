"""Who wins when several ask, and what no plan may hold."""

from __future__ import annotations

import pytest

from flodl_shm.control.options import Wishes
from flodl_shm.control.plan import COUNTS, DEFAULTS, LARGEST_COUNT, check, merge, settle
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank


def test_flags_win_over_the_script_and_the_script_over_defaults() -> None:
    plan = settle(Wishes(epochs=3), Wishes(epochs=9, seed=7), world_size=2, samples=1000)
    assert (plan.epochs, plan.seed, plan.policy) == (3, 7, DEFAULTS.policy)
    assert (plan.world_size, plan.samples) == (2, 1000)


def test_merge_keeps_the_first_word() -> None:
    said = merge(Wishes(seed=1), Wishes(seed=2, epochs=4))
    assert said == {"seed": 1, "epochs": 4}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(policy="fast"), "policy 'fast'"),
        (Wishes(tail="cut"), "tail 'cut'"),
        (Wishes(epochs=0), "epochs is 0"),
        (Wishes(batch_size=-1), "batch_size is -1"),
        (Wishes(anchor=0), "anchor is 0"),
        (Wishes(max_anchor=0), "max_anchor is 0"),
        (Wishes(seed=-3), "seed is -3"),
        (Wishes(overhead_target=0.9), "overhead_target is 0.9"),
        (Wishes(gamma=float("inf")), "gamma is inf"),
        (Wishes(augment=0), "augment is 0"),
        (Wishes(batch_size=(4, 0)), "batch_size is 0"),
        (Wishes(max_batch_diff=-1), "max_batch_diff is -1"),
        (Wishes(max_grad_norm=0.0), "max_grad_norm is 0"),
        (Wishes(anchor=9, max_anchor=5), "anchor 9 is greater than max_anchor 5"),
        (Wishes(save_every=-1), "save_every is -1"),
        (Wishes(epoch_callback_rank="slowest"), "epoch_callback_rank is 'slowest'"),
        (Wishes(epoch_callback_rank="-1"), "epoch_callback_rank is '-1'"),
        (Wishes(epoch_callback_rank="1_0"), "epoch_callback_rank is '1_0'"),
        (Wishes(callback_timeout_s=0.0), "callback_timeout_s is 0"),
        (Wishes(callback_timeout_s=float("nan")), "callback_timeout_s is nan"),
        (Wishes(callback_timeout_s=float("inf")), "callback_timeout_s is inf"),
    ],
)
def test_a_value_that_cannot_hold_is_named(wishes: Wishes, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        check(wishes)


def test_rules_hold_across_the_two_speakers() -> None:
    with pytest.raises(BadConfig, match="anchor 9 is greater than max_anchor 5"):
        settle(Wishes(anchor=9), Wishes(max_anchor=5), world_size=1, samples=100)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(batch_size=(4, 4, 4)), "3 batch sizes are given for 2 ranks"),
        (Wishes(partition_ratios=(0.5,)), "1 partition ratios are given for 2 ranks"),
        (Wishes(partition_ratios=(1.5, -0.5)), "not all greater than 0"),
        (Wishes(partition_ratios=(0.5, 0.7)), "0.5, 0.7 sum to 1.2"),
        (Wishes(speed_hint=(Rank(2), 2.0)), "names rank 2 of 2 ranks"),
        (Wishes(speed_hint=(Rank(1), 0.4)), "the others are 0.4 times as fast"),
        (Wishes(epoch_callback_rank="5"), "names rank 5 of 2 ranks"),
    ],
)
def test_what_is_said_of_ranks_must_fit_the_world(wishes: Wishes, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        settle(wishes, Wishes(), world_size=2, samples=1000)


@pytest.mark.parametrize(
    ("tail", "sizes", "dealt"),
    [("drop", 32, 992), ("keep", 32, 1000), ("drop", (48, 32), 992), ("drop", (7, 7), 994)],
)
def test_picks_of_an_epoch(tail: str, sizes: int | tuple[int, ...], dealt: int) -> None:
    wishes = Wishes(tail=tail, batch_size=sizes)
    assert settle(wishes, Wishes(), world_size=2, samples=1000).epoch_picks == dealt


def test_augmentations_multiply_the_picks() -> None:
    plan = settle(Wishes(augment=3, batch_size=10), Wishes(), world_size=2, samples=100)
    assert (plan.picks, plan.epoch_picks) == (300, 300)


def test_too_little_data_is_told_with_its_numbers() -> None:
    with pytest.raises(BadConfig, match="the dataset is empty"):
        settle(Wishes(), Wishes(), world_size=2, samples=0)
    with pytest.raises(BadConfig, match="63 samples, fewer than 2 ranks x batch size 32 = 64"):
        settle(Wishes(), Wishes(), world_size=2, samples=63)
    with pytest.raises(
        BadConfig, match=r"has 21 samples \(63 with --augment 3\), fewer than 2 ranks"
    ):
        settle(Wishes(augment=3), Wishes(), world_size=2, samples=21)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_no_message_can_carry_is_refused(name: str) -> None:
    check(Wishes(**{name: LARGEST_COUNT}))
    with pytest.raises(BadConfig, match=f"{name} is {2**64}. {LARGEST_COUNT} at most"):
        check(Wishes(**{name: 2**64}))


def test_an_epoch_too_long_for_a_message_is_refused() -> None:
    with pytest.raises(BadConfig, match=f"{2**62} samples x --augment 4 has too many picks"):
        settle(Wishes(augment=4), Wishes(), world_size=2, samples=2**62)
