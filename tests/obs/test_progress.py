from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec

from flodl_shm.control.messages import EpochClosed, Note, Resumed
from flodl_shm.ids import Nanos
from flodl_shm.obs.progress import Progress, View
from flodl_shm.obs.summary import summary

RUN = Path("runs/one")


def shown(feed, **view):
    """The whole screen of a small run in which rank 1 is half as fast."""
    screen = io.StringIO()
    progress = Progress(feed.tally, screen, View(clock=lambda: "14:22:05", **view))
    progress.start("one", RUN)
    feed.form()
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20}, loss=2.0)
    progress.tick(Nanos(feed.now))
    progress.tick(Nanos(feed.now + 1))
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20}, wait_ms=2, loss=1.0)
    feed.close(picks=30, loss=1.5)
    progress.feed(EpochClosed(0, 30, 30, 0, 0, 1, 1.5), Nanos(feed.now))
    for text, alert in (("steady", False), ("steady", False), ("rank 1 lost", True)):
        progress.feed(Note("death" if alert else "gate", text, alert), Nanos(feed.now))
    feed.finish()
    progress.end(summary(feed.tally, now=Nanos(feed.now)), RUN)
    return screen.getvalue()


def test_the_plain_view_of_a_run(feed):
    assert shown(feed).splitlines() == [
        "flodl one: paced, backend shm",
        "  rank 0  cpu",
        "  rank 1  cpu",
        "  files  runs/one",
        "14:22:05 reduce 2  epoch 0 50%  147 picks/s  idle 0%, 0%  loss 2  about 0.1 s left",
        "14:22:05 epoch 0 done  loss 1.5  picks 30  so far 146 picks/s  shares 2 : 1  he 0.97",
        "14:22:05 rank 1 lost",
        "ok",
        "  loss per epoch  1.5",
        "  30 picks in 0.2 s, 146 picks/s, 3 reduces",
        "  shares 2 : 1   idle 1%, 1%",
        "  he 0.97   a barrier after every batch would reach 0.67",
        "  summary runs/one/summary.json",
    ]


def test_quiet_shows_what_went_wrong_and_how_it_ended(feed):
    assert shown(feed, quiet=True).splitlines() == [
        "14:22:05 rank 1 lost",
        "ok",
        "  summary runs/one/summary.json",
    ]


def test_verbose_shows_a_decision_when_it_changes_not_when_it_repeats(feed):
    assert shown(feed, verbose=1).count("14:22:05 steady") == 1


def test_none_shows_nothing(feed):
    assert shown(feed, mode="none") == ""


def test_json_is_one_object_a_line(feed):
    told = [json.loads(line) for line in shown(feed, mode="json").splitlines()]
    assert [one["event"] for one in told] == ["start", "standing", "epoch", "note", "end"]
    assert told[-1]["summary"]["picks_total"] == 30


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_went_away_does_not_end_the_run(feed):
    progress = Progress(feed.tally, Gone())
    progress.say("one")
    progress.say("two")


def test_a_failed_run_says_why(feed):
    screen = io.StringIO()
    feed.finish(ranks=(), status="stopped")
    Progress(feed.tally, screen).end(summary(feed.tally, now=Nanos(feed.now)), RUN)
    assert screen.getvalue().splitlines()[0] == "stopped: all epochs done"


def test_no_progress_still_shows_what_the_script_prints(feed):
    screen = io.StringIO()
    progress = Progress(feed.tally, screen, View(mode="none"))
    progress.say("of the launcher")
    progress.pass_on("[r0] of the script")
    assert screen.getvalue() == "[r0] of the script\n"


def test_what_a_script_prints_on_stderr_is_not_mixed_into_stdout(feed):
    screen, errors = io.StringIO(), io.StringIO()
    progress = Progress(feed.tally, screen, View(), errors=errors)
    progress.pass_on("[r0] a warning", is_error=True)
    progress.pass_on("[r0] a figure")
    assert (screen.getvalue(), errors.getvalue()) == ("[r0] a figure\n", "[r0] a warning\n")


def test_before_anything_is_trained_there_are_no_figures_to_show(feed):
    screen = io.StringIO()
    progress = Progress(feed.tally, screen, View(clock=lambda: "14:22:05"))
    feed.form()
    progress.tick(Nanos(feed.now))
    assert screen.getvalue() == "14:22:05 training begins\n"


def test_what_was_done_before_a_resume_is_not_to_come(feed):
    """Three epochs of 30 picks, one of them done in an earlier run: as much is left as was done."""
    screen = io.StringIO()
    progress = Progress(feed.tally, screen, View(clock=lambda: "14:22:05"))
    closed = EpochClosed(0, 30, 30, 0, 0, 0, 1.0)
    feed.say(Resumed("ckpt/model-30", 30, (closed,), "goes on"))
    feed.form()
    feed.tally.plan = msgspec.structs.replace(feed.tally.plan, epochs=3)
    feed.window({0: 15, 1: 15}, {0: 1000, 1: 1000}, reduce_ms=0)
    progress.tick(Nanos(feed.now))
    assert "about 15.0 s left" in screen.getvalue()


def test_a_loss_that_was_never_finite_is_nan_not_unknown(feed):
    screen = io.StringIO()
    progress = Progress(feed.tally, screen, View(clock=lambda: "14:22:05"))
    feed.form()
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20}, loss=2.0)
    feed.close(picks=30, loss=None)
    progress.feed(EpochClosed(0, 30, 30, 0, 0, 1, None), Nanos(feed.now))
    feed.finish()
    progress.end(summary(feed.tally, now=Nanos(feed.now)), RUN)
    assert "epoch 0 done  loss nan  picks 30" in screen.getvalue()
    assert "loss per epoch  nan" in screen.getvalue()


def test_what_stands_beside_a_device(feed):
    screen = io.StringIO()
    Progress(feed.tally, screen, View(beside=("", "slow 1:2.5"))).start("one", RUN)
    assert screen.getvalue().splitlines()[1:3] == ["  rank 0  cpu", "  rank 1  cpu  slow 1:2.5"]
