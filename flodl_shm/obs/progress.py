"""What a person sees of a run: a start block, a line now and then, deaths, an end block.

Whole plain lines on one stream, so a terminal, a file and a CI log all read well; `json` gives
the same moments as one object per line; `live` lets the lines pass above a region that shows the
ranks. The record of the run is the journal, this is a view of it. Ranks never draw: only the
launcher holds a Progress. The clock is an argument, but for the time of day in front of a line.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from flodl_shm.control.messages import (
    Died,
    EpochClosed,
    Evaluated,
    Note,
    Published,
    Rejoined,
    Resumed,
)
from flodl_shm.obs.metrics import epoch_figures
from flodl_shm.obs.profile import profile_lines
from flodl_shm.obs.words import clip, duration, fraction, number, percent, rate, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from flodl_shm.control.messages import Message
    from flodl_shm.ids import Nanos
    from flodl_shm.obs.live_screen import LiveScreen, Row
    from flodl_shm.obs.tally import Tally

ALERTS = 3  # the newest ones stay in the live region: a loud rank must not scroll them away
EVERY_NS = 10 * 1_000_000_000  # often enough to see it lives, seldom enough for a log of hours


@dataclass(frozen=True, slots=True)
class View:
    """How much to show. `mode`: live | line | json | none; `auto` is one of them by now."""

    mode: str = "line"
    colour: bool = True  # of the live region
    quiet: bool = False  # nothing but alerts and the end's result
    verbose: int = 0  # 1: every decision when it changes
    every_ns: int = EVERY_NS
    beside: Sequence[str] = ()  # for each rank, what stands beside its device in the start block
    clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S")


class Progress:
    """Writes the view of one run to `stream`. Feed it after the tally, with the same messages.

    What ranks print on stderr goes to `errors`, as that of a plain script would, unless a region
    is drawn here: then every line passes above it. None: to `stream` too.
    """

    def __init__(
        self,
        tally: Tally,
        stream: TextIO,
        view: View | None = None,
        *,
        errors: TextIO | None = None,
    ) -> None:
        self._tally = tally
        self._stream = stream
        self._errors = errors or stream
        self._view = view or View()
        self._next_at: Nanos | None = None
        self._told: dict[str, str] = {}  # topic -> what was last said about it
        self._alerts: deque[str] = deque(maxlen=ALERTS)
        self._blind = False  # nobody reads any more
        self._screen = self._open_screen()

    def _open_screen(self) -> LiveScreen | None:
        if self._view.mode != "live" or self._view.quiet:
            return None
        from flodl_shm.obs.live_screen import LiveScreen  # it imports rich

        return LiveScreen(self._stream, colour=self._view.colour)

    # ---- moments of a run ---------------------------------------------------------------------

    def start(self, run_id: str, path: Path) -> None:
        """The start block: what runs, on what, where its files are."""
        facts = self._tally.facts
        if self._view.mode == "json":
            self._object("start", run_id=run_id, path=str(path), devices=list(facts.devices))
            return
        if self._view.quiet:
            return
        self._plain(f"flodl {run_id}: {facts.workload}, backend {facts.backend}")
        beside = dict(enumerate(self._view.beside))
        for rank, device in enumerate(facts.devices):
            self._plain(f"  rank {rank}  {device}  {beside.get(rank, '')}".rstrip())
        self._plain(f"  files  {path}")

    def feed(self, message: Message, now: Nanos) -> None:
        """Show what this message changes, if it is worth a line."""
        match message:
            case EpochClosed():
                self._epoch(message, now)
            case Note():
                self._note(message)
            case Resumed() if not self._view.quiet:
                self._moment(message.text, "resumed", folder=message.folder, text=message.text)
            case Published() if message.folder and not self._view.quiet:
                self._moment(f"saved {message.folder}", "saved", folder=message.folder)
            case Rejoined() if not self._view.quiet:
                self._moment(
                    message.text,
                    "rejoin",
                    rank=message.rank,
                    incarnation=message.incarnation,
                    text=message.text,
                )
            case Died() if self._view.mode == "json":
                self._object("death", rank=message.rank, cause=message.cause)
            case Evaluated() if message.value is not None and not self._view.quiet:
                self._moment(
                    f"epoch {message.epoch}  evaluation {number(message.value)}",
                    "evaluation",
                    epoch=message.epoch,
                    value=message.value,
                )
            case _:
                pass

    def tick(self, now: Nanos) -> None:
        """A line, or a drawing, if the last one is old enough. Call as often as convenient."""
        if self._screen is not None:
            self._draw(self._screen, now)
            return
        if self._tally.last_commit is None or self._view.quiet:
            return
        if self._next_at is None:
            self._next_at = now
        if now >= self._next_at:
            self._next_at = type(now)(now + self._view.every_ns)
            self._moment(self._standing(), "standing", **self._figures())

    def say(self, text: str) -> None:
        """One line of the launcher's own, shown whatever was asked for but `none`."""
        self._moment(text, "note", text=text)

    def pass_on(self, line: str, *, is_error: bool = False) -> None:
        """A whole line a rank has printed, on stderr if so said, its prefix included."""
        if self._view.mode == "json":
            self._object("output", text=line)
        elif not self._blind:  # `none` hides what the launcher says, not the user's own words
            self._write(line, self._errors if is_error else self._stream)

    def close(self) -> None:
        """Nothing is drawn from here on: what follows are plain lines. Twice is harmless."""
        screen, self._screen = self._screen, None
        if screen is not None:
            self._or_go_blind(screen.close)

    def end(self, summary: dict[str, Any], path: Path) -> None:
        """The end block. `summary` is what obs/summary.py made."""
        self.close()
        if self._view.mode == "json":
            self._object("end", status=summary["status"], summary=summary)
            return
        for line in self._end_lines(path):
            self._plain(line)
        if self._view.verbose:
            for line in profile_lines(summary["per_rank"]):
                self._plain(line)

    # ---- lines --------------------------------------------------------------------------------

    def _epoch(self, epoch: EpochClosed, now: Nanos) -> None:
        if self._view.quiet:
            return
        self._next_at = type(now)(now + self._view.every_ns)
        tally = self._tally
        parts = [
            f"epoch {epoch.epoch} done",
            f"loss {_loss(epoch)}",
            f"picks {epoch.picks}",
            f"so far {rate(tally.picks_per_s)} picks/s",  # the rest is of the training up to here
            f"shares {self._shares()}",
            f"he {fraction(tally.efficiency().he)}",
        ]
        if epoch.duplicated or epoch.missing:
            parts.append(f"{epoch.duplicated} DUPLICATED, {epoch.missing} MISSING")
        self._moment("  ".join(parts), "epoch", **epoch_figures(tally, epoch, now=now))

    def _note(self, note: Note) -> None:
        if self._told.get(note.topic) == note.text and not note.alert:
            return
        self._told[note.topic] = note.text
        if note.alert and self._screen is not None:
            self._alerts.append(f"{self._view.clock()} {note.text}")
        if note.alert or self._view.verbose:
            self._moment(f"{note.text}", "note", topic=note.topic, text=note.text)

    def _standing(self) -> str:
        """Where the run is, in one line: reduce, epoch, speed, idle, loss, what is left."""
        tally, commit = self._tally, self._tally.last_commit
        assert commit is not None  # tick() asks only after a commit
        if not tally.picks:
            return "training begins"
        idle = ", ".join(percent(part) for part in self._idle())
        parts = [
            f"reduce {commit.round}",
            f"epoch {commit.epoch} {percent(self._done_part(commit.epoch))}",
            f"{rate(tally.picks_per_s)} picks/s",
            f"idle {idle}",
        ]
        if commit.loss is not None:
            parts.append(f"loss {number(commit.loss)}")
        left = self._left_s()
        if left is not None:
            parts.append(f"about {duration(left)} left")
        return "  ".join(parts)

    def _figures(self) -> dict[str, object]:
        tally, commit = self._tally, self._tally.last_commit
        assert commit is not None
        return {
            "reduce": commit.round,
            "epoch": commit.epoch,
            "loss": commit.loss,
            "picks_total": tally.picks,
            "picks_per_s": tally.picks_per_s,
            "idle": self._idle(),
        }

    def _end_lines(self, path: Path) -> list[str]:
        tally = self._tally
        status = tally.end.status if tally.end else "failed"
        why = f": {clip(tally.end.reason)}" if tally.end and status != "ok" else ""
        efficiency = tally.efficiency()
        lines = [f"{status}{why}"]
        if tally.epochs and not self._view.quiet:
            losses = " ".join(_loss(epoch) for epoch in tally.epochs)
            lines.append(f"  loss per epoch  {losses}")
        if tally.picks and not self._view.quiet:
            lines.append(
                f"  {tally.picks} picks in {duration(tally.train_ns / 1e9)}, "
                f"{rate(tally.picks_per_s)} picks/s, {len(tally.reduces_ns)} reduces"
            )
            lines.append(
                f"  shares {self._shares()}   idle {', '.join(map(percent, self._idle()))}"
            )
            lines.append(
                f"  he {fraction(efficiency.he)}   a barrier after every batch would reach "
                f"{fraction(efficiency.sync_bound)}"
            )
        lines.append(f"  summary {path / 'summary.json'}")
        return lines

    # ---- small figures ------------------------------------------------------------------------

    def _shares(self) -> str:
        return ratio([rank.committed for rank in self._tally.ranks.values()])

    def _idle(self) -> list[float]:
        """Each rank's waits as a part of what it lived of the training, in rank order."""
        tally = self._tally
        if tally.first_step_at is None or tally.last_commit_at is None:
            return [0.0 for _ in tally.ranks]
        span = (tally.first_step_at, tally.last_commit_at)
        # At most 1: waits before the first step are in the sums, but not in the span.
        return [
            min(1.0, (r.wait_ns + r.barrier_ns + r.data_ns) / lived)
            if (lived := r.lived_ns(*span))
            else 0.0
            for r in tally.ranks.values()
        ]

    def _epoch_total(self) -> int:
        plan = self._tally.plan
        return plan.epoch_picks if plan else 0

    def _done_part(self, epoch: int) -> float:
        total = self._epoch_total()
        return self._tally.epoch_picks.get(epoch, 0) / total if total else 0.0

    def _all_done_part(self) -> float:
        plan, total = self._tally.plan, self._epoch_total()
        return self._all_done() / (total * plan.epochs) if plan and total else 0.0

    def _all_done(self) -> int:
        return self._tally.picks_before + self._tally.picks

    def _left_s(self) -> float | None:
        plan, rate = self._tally.plan, self._tally.picks_per_s
        if plan is None or not rate:
            return None
        return max(0, self._epoch_total() * plan.epochs - self._all_done()) / rate

    # ---- writing ------------------------------------------------------------------------------

    def _draw(self, screen: LiveScreen, now: Nanos) -> None:
        from flodl_shm.obs.live_view import Standing, region

        def rows(width: int, height: int) -> list[Row]:
            standing = Standing(
                done=self._all_done_part(),
                epoch_done=self._done_part(self._tally.last_commit.epoch)
                if self._tally.last_commit
                else 0.0,
                left_s=self._left_s(),
                idle=self._idle(),
                alerts=tuple(self._alerts),
            )
            return region(self._tally, standing, now=now, width=width, height=height)

        self._or_go_blind(lambda: screen.tick(now, rows))

    def _moment(self, text: str, event: str, /, **figures: object) -> None:
        if self._view.mode == "json":
            self._object(event, **figures)
        else:
            self._plain(f"{self._view.clock()} {text}")

    def _object(self, event: str, /, **figures: object) -> None:
        body = msgspec.json.encode({"event": event, **figures}).decode()
        self._write(body)

    def _plain(self, line: str) -> None:
        if self._view.mode != "none":
            self._write(line)

    def _write(self, line: str, stream: TextIO | None = None) -> None:
        if self._screen is not None:
            self._screen.line(_fit(line, self._stream))
        else:
            self._or_go_blind(lambda: self._put(line, stream or self._stream))

    def _put(self, line: str, stream: TextIO) -> None:
        stream.write(_fit(line, stream) + "\n")
        stream.flush()

    def _or_go_blind(self, write: Callable[[], None]) -> None:
        """A reader that went away (`| head`) must not end a training."""
        try:
            write()
        except (OSError, ValueError):
            self._view = View(mode="none", quiet=True)
            self._blind, self._screen = True, None


def _loss(epoch: EpochClosed) -> str:
    """The mean over batches with a finite loss; nan where none had one."""
    return "nan" if epoch.loss is None and epoch.picks else number(epoch.loss)


def _fit(line: str, stream: TextIO) -> str:
    """Only characters that the stream can show, the others spelled out."""
    encoding = stream.encoding or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)
