"""What a rank is asked between two windows is done in its turn, reported, and never fatal."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import StepLR

from flodl_shm.control.messages import (
    AdjustRate,
    Arrived,
    Attached,
    CallbackRan,
    CallEpochFn,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Left,
    PartSaved,
    Ready,
    Save,
)
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank, Round
from flodl_shm.train.checkpoint.names import MODEL, work_folder
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.scalars import record_scalar

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, Net, Session, Ticking, attach, grant, job, run, train_step

ME = Rank(1)
FIRST = (attach(), grant(1, 0))


def save(number=1, *, after=1, has_model=False):
    return Save(rank=ME, save=number, after=Round(after), epoch=0, has_model=has_model)


# ---- the user's functions --------------------------------------------------------------------


def test_ready_names_the_functions_there_are():
    def nothing(*_):
        return 0.0

    session = Session(FINISH)
    run(session, job(epoch_fn=nothing, eval_fn=nothing, metrics_fn=nothing))
    assert session.link.of(Ready)[0].callbacks == ("epoch", "evaluation", "metrics")


def test_the_epoch_function_sees_where_the_rank_stands_and_asks_for_a_rate():
    seen = []

    def epoch_fn(epoch, worker):
        seen.append((epoch, worker.current_epoch, worker.local_step, worker.current_version))
        seen.append((worker.rank, worker.world_size, worker.device, worker.current_lr))
        seen.append(worker.latest_metrics and worker.latest_metrics.epoch)
        worker.set_lr(0.25)
        worker.scale_lr(0.5)

    told = EpochMetrics(rank=ME, epoch=0, loss=0.5, picks=8)
    session = Session(*FIRST, grant(2, 2, ((0, 8),)), told, CallEpochFn(ME, 1), FINISH)
    run(session, job(epoch_fn=epoch_fn))
    assert seen == [(1, 1, 2, 2), (1, 2, torch.device("cpu"), 0.1), 0]
    (ran,) = session.link.of(CallbackRan)
    assert (ran.role, ran.epoch, ran.lr, ran.lr_scale, ran.error) == ("epoch", 1, 0.25, 0.5, "")
    assert ran.elapsed_ns > 0


def test_one_that_raises_is_reported_and_asks_for_nothing():
    def epoch_fn(epoch, worker):
        worker.set_lr(9.0)
        raise OSError("no room for the plot")

    session = Session(*FIRST, CallEpochFn(ME, 0), FINISH)
    assert run(session, job(epoch_fn=epoch_fn)).status == "ok"
    (ran,) = session.link.of(CallbackRan)
    assert ran.error.startswith("OSError: no room for the plot")
    assert (ran.lr, ran.lr_scale) == (None, 1.0)


def test_alone_it_may_set_a_schedule():
    session = Session(*FIRST, CallEpochFn(ME, 0), grant(2, 1, ((0, 4),)), FINISH)
    session.world_size = 1
    run(session, job(epoch_fn=lambda epoch, worker: worker.set_scheduler(lambda step: 0.75)))
    assert session.link.of(Arrived)[1].lr == 0.75


def test_the_rate_that_was_adjusted_is_that_of_the_steps_after_it():
    session = Session(
        *FIRST,
        AdjustRate(ME, None, 0.5),
        grant(2, 1, ((0, 4),)),
        AdjustRate(ME, 0.3, 1.0),
        grant(3, 1, ((4, 8),), after=4),
        FINISH,
    )
    run(session)
    assert [report.lr for report in session.link.of(Arrived)] == [0.1, 0.05, 0.3]


def test_metrics_are_called_on_the_rank_that_is_told_to_and_heard_by_all():
    heard = []
    mine = EpochMetrics(rank=ME, epoch=1, loss=0.5, picks=8, calls=True)
    session = Session(*FIRST, EpochMetrics(rank=ME, epoch=0, loss=0.5, picks=8), mine, FINISH)
    run(session, job(metrics_fn=heard.append))
    assert heard == [mine]
    assert [(ran.role, ran.epoch) for ran in session.link.of(CallbackRan)] == [("metrics", 1)]


def test_errands_are_neither_wait_nor_work():
    session = Session(*FIRST, CallEpochFn(ME, 0), Evaluate(ME, 0), grant(2, 1, ((0, 4),)), FINISH)
    clocks = []

    def wait(*_):
        clocks[0].now += 10_000_000
        return 0.5

    clocks.append(Ticking())
    GpuWorker(job(epoch_fn=wait, eval_fn=wait), session, clock=clocks[0]).run()
    _, report = session.link.of(Arrived)
    assert report.callback_ns >= 20_000_000
    assert report.wait_ns + report.busy_ns + report.data_ns < 1_000_000
    assert session.link.of(Evaluated)[0].value == 0.5


def test_what_the_script_notes_goes_with_its_window():
    def step(model, batch):
        loss = train_step(model, batch)
        record_scalar("loss", loss)
        record_scalar("ones", 1)
        return loss

    session = Session(*FIRST, grant(2, 2, ((0, 8),)), grant(3, 1, ((8, 12),), after=8), FINISH)
    run(session, job(train_step=step))
    none, second, third = (report.scalars for report in session.link.of(Arrived))
    assert none == {}
    assert second["ones"] == (2.0, 2)
    assert second["loss"] == pytest.approx((session.link.of(Arrived)[1].loss_sum, 2))
    assert third["ones"] == (1.0, 1)


def test_losses_that_are_never_finite_are_counted_as_none():
    session = Session(*FIRST, grant(2, 2, ((0, 8),)), FINISH)
    run(session, job(train_step=lambda model, batch: train_step(model, batch) * float("nan")))
    assert session.link.of(Arrived)[1].loss_count == 0


# ---- saves -----------------------------------------------------------------------------------


def saving(session, tmp_path):
    session.save_stem, session.run_id = str(tmp_path / "ckpt" / "model"), "r1"
    return Path(session.save_stem)


def test_a_part_is_written_before_the_rank_has_finished(tmp_path):
    session = Session(*FIRST, save(3, has_model=True), FINISH)
    stem = saving(session, tmp_path)
    run(session)
    kinds = [type(report) for report in session.link.sent]
    assert kinds.index(PartSaved) < kinds.index(Finished)
    (part,) = session.link.of(PartSaved)
    assert (part.save, part.error) == (3, "")
    folder = work_folder(stem, "r1", 3)
    assert {file.name for file in part.files} <= {path.name for path in folder.iterdir()}
    assert MODEL in {file.name for file in part.files}


def test_without_a_launcher_a_save_is_answered_in_words():
    session = Session(*FIRST, save(), FINISH)
    run(session)
    (part,) = session.link.of(PartSaved)
    assert (part.save, part.files) == (1, ())
    assert part.error.startswith("no launcher")


@pytest.mark.parametrize("has_model", [True, False])
def test_the_checkpoint_function_is_called_where_the_model_is_written(has_model, tmp_path):
    called = []
    session = Session(*FIRST, save(after=1, has_model=has_model), FINISH)
    saving(session, tmp_path)
    run(session, job(checkpoint_fn=lambda version, model: called.append((version, type(model)))))
    assert called == ([(1, Net)] if has_model else [])
    assert [ran.role for ran in session.link.of(CallbackRan)] == ["checkpoint"] * has_model


def test_what_is_saved_is_the_consensus_of_the_round_before(tmp_path):
    """Whatever the rank trains while the file is being written."""
    windows = (grant(2, 1, ((0, 4),)), save(after=2, has_model=True))
    session = Session(*FIRST, *windows, grant(3, 3, ((4, 16),), after=4), FINISH)
    stem = saving(session, tmp_path)
    run(session)
    short = Session(*FIRST, windows[0], FINISH)
    expected = run(short)
    saved = load_file(work_folder(stem, "r1", 1) / MODEL)
    for name, tensor in (expected.params | expected.buffers).items():
        assert torch.equal(saved[name], tensor), name


# ---- resume ----------------------------------------------------------------------------------


class Noisy(Net):
    """Draws a number in every step: without its random state it would train something else."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


def decays(optimizer, world_size):
    return StepLR(optimizer, 6, gamma=0.5)


def test_a_rank_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    """Its own model, optimizer, random and scheduler state are all there."""
    windows = [
        grant(2, 3, ((0, 12),)),
        grant(3, 2, ((12, 20),), after=12),
        grant(4, 1, ((20, 24),), after=20),
    ]
    what = {"model": Noisy, "optimizer": adam, "scheduler": decays}
    whole = Session(*FIRST, *windows[:2], save(has_model=True), windows[2], FINISH)
    stem = saving(whole, tmp_path)
    expected = run(whole, job(**what))
    folder = work_folder(stem, "r1", 1)
    resumed = msgspec.structs.replace(
        attach(),
        global_step=20,  # 5 of the others in each of three rounds, and 5 own
        checkpoint=str(folder),
        state_of=ME,
    )
    rest = Session(resumed, grant(2, 1, ((20, 24),), after=0), FINISH)
    state = run(rest, job(**what))
    assert [type(report) for report in rest.link.sent][1] is Attached
    assert rest.link.of(Arrived)[-1].lr == whole.link.of(Arrived)[-1].lr
    for name, tensor in (expected.params | expected.buffers).items():
        assert torch.equal((state.params | state.buffers)[name], tensor), name
    assert len(rest.link.of(Left)) == 1


def test_another_model_than_the_checkpoints_is_refused(tmp_path):
    session = Session(*FIRST, save(has_model=True), FINISH)
    stem = saving(session, tmp_path)
    run(session)
    folder = work_folder(stem, "r1", 1)
    order = msgspec.structs.replace(attach(), checkpoint=str(folder), state_of=ME)
    with pytest.raises(BadConfig, match="does not fit"):
        run(Session(order, FINISH), job(model=torch.nn.Linear(3, 1)))


def test_a_stop_before_the_arena_has_no_errands_to_wait_for():
    session = Session(Finish(rank=ME, status="stopped", reason="interrupt"))
    assert run(session).status == "stopped"


# ---- who watches --------------------------------------------------------------------------------


def test_whoever_watches_sees_since_when_an_errand_lasts_and_that_it_is_over():
    seen = []
    session = Session(*FIRST, CallEpochFn(rank=ME, epoch=0), FINISH)
    run(session, job(epoch_fn=lambda epoch, handle: seen.append(session.errand)))
    assert seen[0] > 0
    assert session.errand == 0


def test_an_errand_that_is_interrupted_is_over_too():
    def leave(epoch, handle):
        raise SystemExit(3)

    session = Session(*FIRST, CallEpochFn(rank=ME, epoch=0), FINISH)
    with pytest.raises(SystemExit):
        run(session, job(epoch_fn=leave))
    assert session.errand == 0
