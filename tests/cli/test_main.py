"""How commands end: codes, one sentence on stderr, and death by the signal that interrupted."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys

import click
import pytest

from flodl_net import cli as net
from flodl_shm import __version__
from flodl_shm.cli import main as front
from flodl_shm.cli.commands import LATER_COMMANDS
from flodl_shm.errors import BadConfig, HostUnfit, PeersLost, RankFailed, WeBroke
from flodl_shm.shm import janitor


def command_that(raises):
    @click.command()
    def command():
        raise raises

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RankFailed("a"), 1),
        (BadConfig("a", hint="Do b."), 2),
        (HostUnfit("a"), 3),
        (PeersLost("a"), 4),
        (WeBroke("a"), 70),
        (ZeroDivisionError("a"), 70),
        (click.BadParameter("a"), 2),
    ],
)
def test_every_error_ends_in_its_code_and_one_sentence(capsys, error, code):
    assert front.end_of(command_that(error), [], prog="x") == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")


def test_a_hint_follows_and_line_breaks_do_not(capsys):
    error = BadConfig("first\nsecond", hint="Do this.")
    front.end_of(command_that(error), [], prog="x")
    assert capsys.readouterr().err == "error: first second. Do this.\n"


def test_our_bug_shows_its_traceback_and_the_users_mistake_does_not(capsys):
    front.end_of(command_that(WeBroke("a")), [], prog="x")
    assert "Traceback" in capsys.readouterr().err
    front.end_of(command_that(HostUnfit("a")), [], prog="x")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "number"),
    [
        (KeyboardInterrupt(), signal.SIGINT),
        (BrokenPipeError(), signal.SIGPIPE),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), signal.SIGPIPE),  # click catches this one
    ],
)
def test_an_interrupted_command_dies_of_the_signal(monkeypatch, raised, number):
    died = []
    monkeypatch.setattr(front, "_die_of", died.append)
    assert front.end_of(command_that(raised), [], prog="x") == 128 + number
    assert died == [number]


@pytest.mark.procs
def test_the_death_is_a_real_one():
    code = "import signal, flodl_shm.cli.main as m; m._die_of(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGINT


def test_version_and_help(capsys):
    assert front.main(["--version"]) == 0
    assert front.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"flodl-shm {__version__}\n")
    assert "(later) Check this machine" in out


def test_no_command_shows_the_help_and_is_a_usage_error(capsys):
    assert front.main([]) == 2
    assert "Usage: flodl-shm" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(LATER_COMMANDS))
def test_commands_of_later_versions_are_refused_whatever_they_are_given(capsys, name):
    assert front.main([name, "runs/latest", "--json", "--watch"]) == 2
    assert capsys.readouterr().err == f"error: flodl-shm {name} is not available in this version\n"
    assert front.main([name, "--help"]) == 0


@pytest.mark.parametrize(
    ("removed", "text"), [([], "nothing to remove"), (["flodl-0-a"], "1 leftovers removed")]
)
def test_clean(monkeypatch, capsys, removed, text):
    monkeypatch.setattr(janitor, "sweep", lambda: removed)
    assert front.main(["clean"]) == 0
    assert text in capsys.readouterr().out
    assert front.main(["clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "removed": removed}


def test_flodl_net_says_that_it_is_not_there_yet(capsys):
    assert net.main(["join", "host:1", "--token", "x"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {net.SENTENCE}\n")
    assert net.main(["--help"]) == 0
