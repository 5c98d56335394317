"""A script under plain python that launches its own ranks, and what such a rank does differently.

Each rank re-runs the script. The k-th run() of the launching process pairs with the k-th of its
ranks: a rank answers the earlier ones with what they brought, which the launching process has
kept, trains the k-th, and leaves right after it. So what follows run() happens once, in the
launching process. Whether a script should do this is not decided here.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flodl_shm.engine.launch import conduct
from flodl_shm.engine.ticket import Earlier
from flodl_shm.errors import FlodlError, PeersLost, of_exit_code
from flodl_shm.proc.signals import die_of
from flodl_shm.train.callbacks import Callbacks
from flodl_shm.train.state_file import load_state, save_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.engine.config import RunConfig
    from flodl_shm.engine.launch import Outcome
    from flodl_shm.engine.ticket import Ticket
    from flodl_shm.train.job import Job
    from flodl_shm.train.state import TrainedState

LOOK_S = 0.005  # between looks at whether somebody else has written the state

_kept: list[Earlier] = []  # of this process, in the order of its run()s


def train_by_ranks(config: RunConfig, job: Job) -> TrainedState:
    """Launch, wait, and read the state. Raises FlodlError for a run that failed.

    Stopped once, a run still has a state. Stopped at once, it has none: the process ends as it
    would have without us.
    """
    config = replace(config, start="spawn", earlier=tuple(_kept))
    callbacks = Callbacks(job, timeout_s=config.callback_timeout_s)
    outcome = conduct(config, on_metrics=lambda told: callbacks.metrics(told).error)
    try:
        state = _state_of(outcome)
    except FlodlError as error:
        _kept.append(Earlier(exit_code=error.exit_code, reason=str(error)))
        raise
    _kept.append(Earlier(state=str(outcome.run_dir.state), value=outcome.value))
    return state


def _state_of(outcome: Outcome) -> TrainedState:
    end, path = outcome.end, outcome.run_dir.state
    if end.exit_code:
        raise of_exit_code(end.exit_code, end.reason)
    if outcome.stopped_by and not path.is_file():
        if outcome.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        die_of(outcome.stopped_by)
    if not path.is_file():
        raise PeersLost("every rank that finished was lost before it wrote the trained state")
    return replace(load_state(path), evaluation=outcome.value)


class OneRun:
    """The one run() of a script that this rank is there for; see train/session.py.

    `is_heir()` says whether every rank before this one is gone: the lowest one writes the state.
    """

    def __init__(self, ticket: Ticket, is_heir: Callable[[], bool]) -> None:
        self._earlier = deque(ticket.earlier or ())
        self._path = Path(ticket.state_file)
        self._is_heir = is_heir
        self._left = False

    def answer(self) -> TrainedState | None:
        """What an earlier run() brought, be it an error; None: this is the one to train."""
        if self._left:  # the script has caught SystemExit, or what its training raised
            raise SystemExit
        if not self._earlier:
            self._left = True
            return None
        earlier = self._earlier.popleft()
        if not earlier.state:
            raise of_exit_code(earlier.exit_code, earlier.reason)
        return replace(load_state(Path(earlier.state)), evaluation=earlier.value)

    def leave(self, state: TrainedState) -> NoReturn:
        """See that the state is written, and end the script. A lower rank may die over it."""
        while not self._path.is_file():
            if self._is_heir() and not self._path.is_file():
                save_state(state, self._path)
            else:
                time.sleep(LOOK_S)
        raise SystemExit
