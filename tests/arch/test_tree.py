"""What holds of every file: size, ASCII, no machine's paths, and that scripts can be run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
# Homes of a person or a machine: a path that is right in one place only. /home/me is nobody's.
MACHINE_PATHS = re.compile(r"/(?:home/(?!me/)\w+|root|work|Users/\w+|opt/wheels)/")


def tracked():
    """Files of the project: what git knows or would add; everything where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    folders = ("flodl_shm", "flodl_net", "tests", "scripts", ".ci")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
OURS = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("flodl_shm", "flodl_net")]


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PYTHON, ids=named)
def test_files_are_small_and_ascii(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert text.isascii(), [line for line in text.splitlines() if not line.isascii()]


@pytest.mark.parametrize("path", OURS, ids=named)
def test_modules_say_what_they_are_for_and_functions_are_short(path):
    tree = ast.parse(path.read_text())
    if tree.body:
        doc = ast.get_docstring(tree)
        assert doc, "no module docstring"
        assert len(doc.splitlines()) <= 20
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # The body: a signature that names every option is no long function.
            length = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_path_of_one_machine_stands_in_the_tree():
    found = [
        f"{named(path)}: {match[0]}"
        for path in FILES
        if path != Path(__file__)
        for match in MACHINE_PATHS.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found


@pytest.mark.parametrize("path", [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"], ids=named)
def test_scripts_can_be_run_and_stop_at_the_first_error(path):
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!")
    if "bash" in text.splitlines()[0]:
        assert "set -euo pipefail" in text
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_the_lock_names_torch_first_and_every_requirement():
    lock = [
        line
        for line in (ROOT / "requirements-lock.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lock[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lock)
    pinned = {canonical(line.split("==")[0]) for line in lock}
    assert requirements("options", "install_requires") <= pinned
    assert requirements("options.extras_require", "examples") <= pinned
    assert requirements("options.extras_require", "dev") <= pinned


def test_pyproject_holds_only_what_cannot_be_in_setup_cfg():
    import tomllib

    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(told) == {"build-system", "tool"}
    assert set(told["tool"]) == {"ruff"}


def requirements(section, key):
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return {
        canonical(re.split(r"[<>=!~ ]", line)[0])
        for line in parser[section][key].split("\n")
        if line
    }


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()
