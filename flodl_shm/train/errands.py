"""What a rank is asked to do between two windows, while its replica holds the consensus.

Calls the user's functions, changes the learning rate, saves. Each errand is done when its order
is read, on the thread that trains, and reported; none of them fails the training. Windows, rounds
and the end are not known here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    AdjustRate,
    CallbackRan,
    CallEpochFn,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Lend,
    Lent,
    PartSaved,
    Save,
)
from flodl_shm.ids import Round
from flodl_shm.train.callbacks import Callbacks
from flodl_shm.train.checkpoint.names import loan_folder, work_folder
from flodl_shm.train.checkpoint.saver import Saver
from flodl_shm.train.epoch_handle import EpochHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from flodl_shm.control.messages import Order
    from flodl_shm.train.callbacks import Ran
    from flodl_shm.train.epoch_handle import RankFacts
    from flodl_shm.train.job import Job
    from flodl_shm.train.lr import LearningRate
    from flodl_shm.train.session import Session

Errand = CallEpochFn | AdjustRate | Save | Evaluate | Lend | EpochMetrics


class Errands:
    """Those of one rank in one training. `equip` it before the first one."""

    def __init__(self, job: Job, session: Session, *, clock: Callable[[], int]) -> None:
        self._session = session
        self._callbacks = Callbacks(job, timeout_s=session.callback_timeout_s, clock=clock)
        self._clock = clock
        self._saver: Saver | None = None
        self._optimizer: Optimizer
        self._rate: LearningRate
        self._facts: RankFacts
        self.evaluation: float | None = None  # the last one that was made here

    @property
    def has(self) -> tuple[str, ...]:
        """The user's functions, as Ready names them."""
        return self._callbacks.has

    def equip(self, facts: RankFacts, optimizer: Optimizer, rate: LearningRate) -> None:
        """Say what there is to work on."""
        self._facts, self._optimizer, self._rate = facts, optimizer, rate

    def run(self, order: Order) -> bool:
        """Do what is asked; False: it is no errand."""
        if not isinstance(order, Errand):
            return False
        self._session.note_errand(self._clock())
        try:
            self._do(order)
        finally:
            self._session.note_errand(0)
        return True

    def _do(self, order: Errand) -> None:
        match order:
            case CallEpochFn():
                self._call_epoch_fn(order)
            case AdjustRate():
                self._rate.adjust(order.lr, order.scale)
            case Save():
                self._save(order)
            case Evaluate():
                self._evaluate(order)
            case Lend():
                self._lend(order)
            case EpochMetrics():
                if order.calls:
                    ran = self._callbacks.metrics(order, self._facts.model)
                    self._report("metrics", order.epoch, ran)

    def close(self) -> None:
        """Wait for what is still being written, as long as a user's function may take."""
        limit_s = self._session.callback_timeout_s
        if self._saver is None:
            return
        self._session.note_errand(self._clock())
        if not self._saver.join(limit_s):
            print(f"a checkpoint was not written within {limit_s:g} s", file=sys.stderr)
        self._session.note_errand(0)

    # ---- one by one --------------------------------------------------------------------------

    def _call_epoch_fn(self, order: CallEpochFn) -> None:
        handle = EpochHandle(self._facts)
        ran = self._callbacks.epoch(order.epoch, handle)
        if handle.scheduler is not None:
            self._rate.follow(handle.scheduler)
        lr, scale = handle.wanted  # for all ranks: it comes back as an order
        self._report("epoch", order.epoch, ran, lr=lr, lr_scale=scale)

    def _evaluate(self, order: Evaluate) -> None:
        session, facts = self._session, self._facts
        ran = self._callbacks.evaluate(facts.model, facts.device)
        self.evaluation = ran.value
        session.link.send(
            Evaluated(
                rank=session.rank,
                row=session.row,
                epoch=order.epoch,
                value=ran.value,
                elapsed_ns=ran.elapsed_ns,
                error=ran.error,
            )
        )

    def _save(self, order: Save) -> None:
        session, model = self._session, self._facts.model
        if not session.save_stem:
            error = "no launcher: there is nobody who would publish it"
            session.link.send(
                PartSaved(rank=session.rank, row=session.row, save=order.save, error=error)
            )
        else:
            self._saver = self._saver or self._make_saver()
            self._saver.save(
                order,
                model=model,
                optimizer=self._optimizer,
                scheduler_state=self._rate.state(),
                row=session.row,
            )
        if order.has_model and "checkpoint" in self.has:
            ran = self._callbacks.checkpoint(self._facts.current_version, model)
            self._report("checkpoint", order.epoch, ran)

    def _lend(self, order: Lend) -> None:
        """Copy the optimizer's state now; a thread writes it for the rank that comes back."""
        session = self._session
        folder = loan_folder(session.loans, order.row)

        def tell(part: PartSaved) -> None:
            session.link.send(Lent(session.rank, session.row, order.row, part.error))

        Saver(lambda save: folder, session.rank, tell, self._clock).save(
            Save(session.rank, 0, Round(0), 0, has_model=False),
            model=self._facts.model,
            optimizer=self._optimizer,
            scheduler_state=self._rate.state(),
            row=session.row,
        )

    def _make_saver(self) -> Saver:
        session = self._session
        stem, run_id = Path(session.save_stem), session.run_id

        def folder_of(save: int) -> Path:
            return work_folder(stem, run_id, save)

        return Saver(folder_of, session.rank, session.link.send, self._clock)

    def _report(
        self, role: str, epoch: int, ran: Ran, *, lr: float | None = None, lr_scale: float = 1.0
    ) -> None:
        session = self._session
        session.link.send(
            CallbackRan(
                rank=session.rank,
                row=session.row,
                role=role,
                epoch=epoch,
                elapsed_ns=ran.elapsed_ns,
                error=ran.error,
                lr=lr,
                lr_scale=lr_scale,
            )
        )
