"""What README tells a newcomer is there: commands, options, exit codes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flodl_shm import errors
from flodl_shm.cli.main import cli
from flodl_shm.cli.options import LATER
from flodl_shm.cli.run import run
from flodl_shm.cli.run_options import OPTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

# The frozen set: a flag that goes, or changes its name, breaks somebody's script.
WORKING = {
    "--ranks", "--nproc-per-node", "--devices", "--backend", "--slow", "--workload", "--step-ms",
    "--picks", "--policy", "--epochs", "--batch-size", "--seed", "--tail", "--max-grad-norm",
    "--anchor", "--max-anchor", "--overhead-target", "--gamma", "--dead-after", "--stall-timeout",
    "--grace", "--run-dir", "--name", "--progress", "--show-ranks", "--summary", "--dry-run",
    "--json", "--quiet", "--verbose", "--augment", "--max-batch-diff", "--speed-hint",
    "--partition-ratios", "--eval-every", "--module", "--config", "--start", "--save",
    "--save-every", "--keep", "--resume", "--callback-timeout", "--epoch-callback-rank",
    "--max-failures", "--restarts", "--rejoin-optimizer", "--on-death",
}  # fmt: skip
DECLARED = {
    "--lr-scale", "--max-overshoot",
    "--async-apply", "--easgd-alpha", "--outer", "--guard",
    "--lr-control", "--arena-dtype",
    "--trace", "--serve",
}  # fmt: skip


def flags(options):
    return {name for option in options for name in option.opts if name.startswith("--")}


def test_the_flags_are_the_frozen_set():
    assert flags(o for o in OPTIONS if o.section != LATER) == WORKING
    assert flags(o for o in OPTIONS if o.section == LATER) == DECLARED


def test_the_commands_are_the_frozen_set():
    assert set(cli.commands) == {
        "run", "clean", "doctor", "status", "trace", "report", "plan", "bench", "selftest",
        "replay",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RankFailed, 1),
        (errors.BadConfig, 2),
        (errors.HostUnfit, 3),
        (errors.PeersLost, 4),
        (errors.PeerBroke, 70),
        (errors.WeBroke, 70),
        (errors.FlodlError, 70),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert error("x").exit_code == code
    assert re.search(rf"^\| {code} \|", README, re.MULTILINE), f"README does not name exit {code}"


def commands():
    """Lines of README's shell blocks."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_readme_shows_the_two_commands_and_how_to_run_a_script():
    shown = commands()
    assert "scripts/demo" in shown
    assert "scripts/test" in shown
    assert any("flodl_shm.run" in line and "train.py" in line for line in shown)


@pytest.mark.parametrize("line", commands())
def test_every_command_in_readme_exists(line):
    program, *arguments = shlex.split(line)
    if program.startswith("scripts/"):
        assert (ROOT / program).is_file()
        return
    if program == "python" and arguments[:2] == ["-m", "flodl_shm.run"]:
        _parses(arguments[2:])
    elif program == "flodl-shm" or arguments[:2] == ["-m", "flodl_shm"]:
        arguments = arguments if program == "flodl-shm" else arguments[2:]
        assert arguments[0] in cli.commands
        if arguments[0] == "run":
            _parses(arguments[1:])
    else:
        assert (program, arguments) == ("python", ["train.py"])


def _parses(arguments):
    with run.make_context("run", list(arguments)):
        pass


@pytest.mark.parametrize("flag", sorted(WORKING - {"--nproc-per-node"}))
def test_readme_names_every_option_that_works(flag):
    assert f"`{flag}" in README or f"{flag}`" in README


def test_the_script_in_readme_is_python_and_short():
    (script,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
        if "fl.Trainer(" in block
    ]
    compile(script, "train.py", "exec")
    assert len(script.splitlines()) <= 22
