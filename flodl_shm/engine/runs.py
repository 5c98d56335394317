"""The runs of one script, one after the other, over ranks that live through all of them.

A rank whose run has ended well may report Ready again: its script has called run() once more. The
next run has a coordinator of its own, which hears of earlier deaths first, and files of its own:
RUN_DIR for the first, RUN_DIR/run-2 and so on for the others. How a run goes is not known here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import Present
from flodl_shm.engine.ending import report_end
from flodl_shm.engine.host_loop import HostLoop
from flodl_shm.engine.publisher import Publisher
from flodl_shm.engine.saving import flags_of, stem_of_run
from flodl_shm.ids import Nanos, Round, Row
from flodl_shm.train.checkpoint.room import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.messages import Died, End, Event
    from flodl_shm.control.resume import Resume
    from flodl_shm.engine.host import Host
    from flodl_shm.engine.recorder import Recorder
    from flodl_shm.obs.run_dir import RunDir
    from flodl_shm.proc.signals import SignalPipe


class Runs:
    """`recorder` and `loop` are those of the run that is under way, or was last."""

    def __init__(
        self,
        host: Host,
        signals: SignalPipe,
        *,
        first: Recorder,
        open_recorder: Callable[[RunDir, Nanos, int], Recorder],
        resume: Resume | None = None,
    ) -> None:
        self.recorder = first
        self.loop: HostLoop
        self._host, self._signals = host, signals
        self._open_recorder = open_recorder
        self._resume = resume
        self._number = 1

    def drive(self) -> End:
        """Until every process is gone: the last run's end. Those before it have ended well."""
        events: list[Event] = []
        while True:
            record = self._host.record
            self.recorder.progress.start(record.run_id, record.path)
            end = self._run(events)
            if not self.loop.wanted:
                return end
            events = self._next(end)

    def _run(self, events: list[Event]) -> End:
        """One run, from its coordinator to the last checkpoint on disk."""
        host, config = self._host, self._host.config
        resume = self._resume if self._number == 1 else None
        coordinator = Coordinator(flags_of(config, self._number), config.ranks, resume=resume)
        stem = Path(stem_of_run(str(host.save_stem), self._number))
        check_writable(stem)
        publisher = Publisher(stem, host.run_dir.run_id, config.keep, host.block.wakeup.notify)
        try:
            self.loop = HostLoop(host, coordinator, self.recorder, self._signals, publisher)
            return self.loop.run(events)
        finally:
            if not publisher.close(config.grace_s):
                self.recorder.say(f"a checkpoint was still on its way to the disk at {stem}")

    def _next(self, end: End) -> list[Event]:
        """Close the books of a run and open new ones; what the new coordinator hears first."""
        host = self._host
        self.recorder.progress.close()
        report_end(host, self.recorder, end, last=False)
        self._number += 1
        host.begin_again(self._number)
        self.recorder = self._open_recorder(host.record, Nanos(time.monotonic_ns()), self._number)
        back = [
            Present(member.rank, member.row)
            for member in host.members.values()
            if not member.gone
            and member.row != Row(member.rank)  # else it is there from the beginning
        ]
        return [*map(_before_it, host.dead.values()), *back, *self.loop.wanted]


def _before_it(death: Died) -> Died:
    """A death as the next run sees it: it has delivered nothing there, and was never alive.

    Whoever came back since is told of after it.
    """
    return msgspec.structs.replace(
        death, row=Row(death.rank), arrived=Round(0), steps=0, picks=0, last_sign_at=Nanos(0)
    )
