"""Everything that listens to a run: journal, figures, settings, terminal. One call tells all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.messages import Died, EpochClosed
from flodl_shm.obs.metrics import epoch_figures
from flodl_shm.obs.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.control.messages import Action, End, Event
    from flodl_shm.engine.settings import SettingsFile
    from flodl_shm.ids import Nanos
    from flodl_shm.obs.journal import Journal
    from flodl_shm.obs.metrics import MetricsFile
    from flodl_shm.obs.progress import Progress
    from flodl_shm.obs.tally import Tally
    from flodl_shm.proc.output import Printed


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
    ) -> None:
        self.journal, self.tally, self.settings = journal, tally, settings
        self.metrics, self.progress = metrics, progress
        self.resources = Resources()

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
        if isinstance(action, EpochClosed):
            self.metrics.write(epoch_figures(self.tally, action, now=now))
        self.progress.feed(action, now)

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
        self.metrics.close()
