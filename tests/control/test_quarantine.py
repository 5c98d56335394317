"""Refused contributions: told, counted by incarnation, and what follows from too many."""

from __future__ import annotations

import pytest

from flodl_shm.control.messages import Arrived, Kill, Note, Seat
from flodl_shm.control.quarantine import LIMIT, Quarantine
from flodl_shm.control.window_ledger import Window
from flodl_shm.errors import RankFailed
from flodl_shm.ids import Rank, Round, Row, Slot

BOTH = {Rank(0): Row(0), Rank(1): Row(1)}


def arrived(rank, number, *, refused=False, batches=4, losses=None, **more):
    return Arrived(
        rank=Rank(rank),
        row=Row(more.pop("row", rank)),
        round=Round(number),
        steps=0 if refused else batches,
        batches=batches,
        picks=4 * batches * number,
        loss_count=batches if losses is None else losses,
        refused=refused,
        broken="parameter fc.weight is nan" if refused else "",
        **more,
    )


def window(*reports, epoch=0):
    number = reports[0].round
    settled = Window(
        round=number,
        epoch=epoch,
        roster=tuple(Seat(r.rank, r.row, Slot(r.rank)) for r in reports),
        anchor_rank=Rank(0),
        anchor_steps=4,
        planned={},
        ceiling={},
        exact=False,
    )
    settled.arrived = {report.rank: report for report in reports}
    settled.picks = {report.rank: 4 * report.batches for report in reports}
    return settled


def judged(quarantine, *reports, living=BOTH, epoch=0):
    return list(quarantine.judge(window(*reports, epoch=epoch), living))


def test_a_refusal_names_rank_round_epoch_tensor_and_picks():
    (note,) = judged(
        Quarantine(), arrived(0, 7), arrived(1, 7, refused=True, losses=2, reset=3), epoch=2
    )
    assert (note.topic, note.alert) == ("numbers", True)
    assert note.text == (
        "rank 1's part of round 7 in epoch 2 is refused: parameter fc.weight is nan; 16 picks "
        "trained nothing, the rank goes on with the consensus and without the optimizer state of "
        "3 parameters"
    )


def test_a_sound_round_says_nothing():
    assert judged(Quarantine(), arrived(0, 2), arrived(1, 2, batches=0)) == []


def test_refusals_in_a_row_cost_the_rank_its_place_once():
    quarantine, kills = Quarantine(), []
    for number in range(2, 2 + LIMIT + 2):
        said = judged(quarantine, arrived(0, number), arrived(1, number, refused=True))
        kills.append([a for a in said if isinstance(a, Kill)])
    assert [len(one) for one in kills] == [0, 0, 1, 0, 0]
    assert kills[2] == [
        Kill(Rank(1), Row(1), "its parameters were not finite in 3 rounds in a row")
    ]


def test_a_sound_window_between_them_begins_the_count_anew_and_an_idle_one_does_not():
    def kills(between):
        quarantine = Quarantine()
        said = [
            judged(quarantine, arrived(0, number), report)
            for number, report in (
                (2, arrived(1, 2, refused=True)),
                (3, arrived(1, 3, refused=True)),
                (4, between),
                (5, arrived(1, 5, refused=True)),
            )
        ]
        return [a for one in said for a in one if isinstance(a, Kill)]

    assert kills(arrived(1, 4)) == []
    assert len(kills(arrived(1, 4, batches=0))) == 1


def test_a_new_incarnation_begins_without_a_past():
    quarantine = Quarantine()
    for number in (2, 3):
        judged(quarantine, arrived(0, number), arrived(1, number, refused=True))
    living = {Rank(0): Row(0), Rank(1): Row(2)}
    said = judged(quarantine, arrived(0, 4), arrived(1, 4, refused=True, row=2), living=living)
    assert not [a for a in said if isinstance(a, Kill)]


def test_the_last_living_rank_is_never_dropped():
    """A dead rank's arrival, the same round, keeps the training from having nobody finite."""
    quarantine, alone = Quarantine(), {Rank(1): Row(1)}
    for number in range(2, 9):
        said = judged(
            quarantine, arrived(0, number), arrived(1, number, refused=True), living=alone
        )
        assert not [a for a in said if isinstance(a, Kill)]


def test_of_two_that_take_turns_only_one_is_dropped():
    """Each breaks while the other has nothing to do."""
    quarantine, dropped = Quarantine(), []
    for number in range(2, 12):
        broken, idle = number % 2, 1 - number % 2
        reports = [
            arrived(broken, number, refused=True),
            arrived(idle, number, batches=0),
        ]
        said = judged(quarantine, *sorted(reports, key=lambda report: report.rank))
        dropped += [a.rank for a in said if isinstance(a, Kill)]
    assert len(dropped) == 1


def test_nobody_finite_is_the_end_and_says_where_one_can_go_on_from():
    quarantine = Quarantine()
    quarantine.saved("runs/x/ckpt/model-000000000012")
    quarantine.saved("")
    judged(quarantine, arrived(0, 4, losses=1), arrived(1, 4))
    with pytest.raises(RankFailed) as caught:
        judged(
            quarantine,
            arrived(0, 5, refused=True, losses=0),
            arrived(1, 5, refused=True),
        )
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        "the training has diverged: after round 5 no rank's parameters are finite (rank 0: "
        "parameter fc.weight is nan, loss not finite since round 4; rank 1: parameter fc.weight "
        "is nan, its losses were finite). Lower the learning rate, or bound the gradients with "
        "max_grad_norm; the newest checkpoint is runs/x/ckpt/model-000000000012."
    )


def test_the_end_without_a_checkpoint_says_so():
    with pytest.raises(RankFailed, match="there is no checkpoint to go on from"):
        judged(Quarantine(), arrived(0, 2, refused=True))


def test_an_idle_rank_still_has_the_consensus():
    said = judged(Quarantine(), arrived(0, 5, refused=True), arrived(1, 5, batches=0))
    assert [type(one) for one in said] == [Note]


def test_losses_that_say_nothing_are_told_once_an_epoch():
    quarantine = Quarantine()
    said = [
        judged(quarantine, arrived(0, number), arrived(1, number, losses=0), epoch=epoch)
        for number, epoch in ((2, 0), (3, 0), (4, 1))
    ]
    assert [len(one) for one in said] == [1, 0, 1]
    assert said[0][0].text == (
        "rank 1: none of 4 losses of round 2 in epoch 0 is finite, though its parameters are"
    )


def test_what_a_dead_rank_never_reported_is_no_alert():
    alone = {Rank(0): Row(0)}
    assert judged(Quarantine(), arrived(0, 2), arrived(1, 2, losses=0), living=alone) == []
