"""Everything that listens to a run: journal, figures, settings, terminal. One call tells all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.messages import Died, EpochMetrics
from flodl_shm.ids import Rank
from flodl_shm.obs.metrics import EpochLines
from flodl_shm.obs.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flodl_shm.control.messages import Action, End, Event
    from flodl_shm.engine.settings import SettingsFile
    from flodl_shm.ids import Nanos
    from flodl_shm.obs.journal import Journal
    from flodl_shm.obs.metrics import MetricsFile
    from flodl_shm.obs.progress import Progress
    from flodl_shm.obs.tally import Tally
    from flodl_shm.proc.output import Printed

    OnMetrics = Callable[[EpochMetrics], str]  # called in the launcher; what went wrong, or nothing


class Recorder:
    """Passes on what happens, in order."""

    def __init__(
        self,
        *,
        journal: Journal,
        tally: Tally,
        settings: SettingsFile,
        metrics: MetricsFile,
        progress: Progress,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        self.journal, self.tally, self.settings = journal, tally, settings
        self.metrics, self.progress = metrics, progress
        self._lines = EpochLines(tally, metrics.write)
        self.resources = Resources()
        self._on_metrics = on_metrics
        self._told = b""  # of an epoch, last

    def event(self, event: Event, now: Nanos) -> None:
        """The coordinator is about to take this."""
        self.journal.write("event", event, now)
        self.tally.feed(event, now)
        self.settings.feed(event)
        self.progress.feed(event, now)

    def action(self, action: Action, now: Nanos) -> None:
        """The coordinator has decided this."""
        self.journal.write("action", action, now)
        self.tally.feed(action, now)
        self.settings.feed(action)
        self._lines.feed(action, now)
        self.progress.feed(action, now)
        if isinstance(action, EpochMetrics):
            self._tell(action)

    def _tell(self, action: EpochMetrics) -> None:
        """Once, of what goes to every rank; as bytes, since a nan equals nothing."""
        told = msgspec.structs.replace(action, rank=Rank(0), calls=False)
        body = msgspec.msgpack.encode(told)
        if self._on_metrics is None or body == self._told:
            return
        self._told = body
        error = self._on_metrics(told)
        if error:
            self.say(f"metrics_fn failed: {error}")

    def remark(self, end: End, now: Nanos) -> None:
        """The launcher ends the run itself; the coordinator has not decided this."""
        self.journal.write("note", end, now)
        self.tally.feed(end, now)
        self.progress.feed(end, now)

    def exited(self, death: Died) -> None:
        """A process has ended, before or after its work was done."""
        self.tally.exited(death.rank, death.cause)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.progress.say(text)

    def show(self, lines: Iterable[Printed]) -> None:
        """What ranks have printed."""
        for line in lines:
            self.progress.pass_on(line.text, is_error=line.stream == "stderr")

    def tick(self, now: Nanos) -> None:
        """Time has passed."""
        self.progress.tick(now)

    def close(self) -> None:
        """Give the files back."""
        self.journal.close()
        self._lines.flush()
        self.metrics.close()
