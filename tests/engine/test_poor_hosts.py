"""Where a run is given too little: too few descriptors, no streams, no directory, a full disk."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.procs

PACED = "--ranks 2 --workload paced --step-ms 1,1 --picks 8 --epochs 1"

# name -> line of shell, exit code, last line on stderr (a regular expression)
CASES = {
    "no-streams": (f'exec "$@" {PACED} <&- >&- 2>&-', 0, ""),
    "no-stdout": (f'exec "$@" {PACED} >&-', 0, ""),
    "full-stdout": (
        f'exec "$@" {PACED} --json >/dev/full',
        3,
        "error: No space left on device.*",
    ),
    "full-stderr": ('exec "$@" --ranks 2 raises.py 2>/dev/full', 1, ""),
    "few-descriptors": (
        f'ulimit -n 20; exec "$@" {PACED}',
        3,
        "error: Too many open files. Raise the limit of open files, ulimit -n; .*",
    ),
    "no-directory": (
        f'mkdir gone; cd gone; rmdir ../gone; exec "$@" {PACED}',
        3,
        "error: the current directory cannot be used: No such file or directory. .*",
    ),
    "no-text": (
        """exec "$@" --ranks 2 raises.py "$(printf 'a\\377')" """,
        2,
        r"error: 'a\\udcff' is no UTF-8. Names of files .*",
    ),
    "summary-is-a-directory": (f'exec "$@" {PACED} --summary .', 2, "error: --summary . is a .*"),
    "latest-is-a-directory": (
        f'mkdir -p runs/latest; exec "$@" {PACED}',
        3,
        "error: .*/runs/latest is a directory, where the link to the newest run belongs. .*",
    ),
    "run-directory-removed": (
        'exec "$@" --ranks 2 removes.py',
        1,
        "ValueError: said after its directory was gone",
    ),
    "nowhere-to-write-why": (
        'exec "$@" --ranks 2 blocks.py',
        1,
        "error: rank 1 failed: exit 1",
    ),
}

REMOVES = """
import shutil
from base import *

def step(model, batch):
    if RANK == 1:
        shutil.rmtree(os.environ["FLODL_RUN_DIR"])
        raise ValueError("said after its directory was gone")
    return mse(model, batch)

train(train_step=step)
"""

# A file where the rank's directory was: nothing can be written there, not even after a mkdir.
BLOCKS = """
import shutil
from base import *

def step(model, batch):
    if RANK == 1:
        place = os.path.join(os.environ["FLODL_RUN_DIR"], "ranks", "rank1")
        shutil.rmtree(place)
        open(place, "w").close()
        raise ValueError("not to be lost")
    return mse(model, batch)

train(train_step=step)
"""


@pytest.fixture(scope="module")
def ends(launches):
    files = {
        "raises.py": "raise ValueError('unheard')",
        "removes.py": REMOVES,
        "blocks.py": BLOCKS,
    }
    started = {name: launches.shell(name, line, files=files) for name, (line, *_) in CASES.items()}
    return lambda name: started[name].result()


@pytest.mark.parametrize("name", CASES)
def test_it_ends_with_one_clear_word(ends, name):
    _, code, says = CASES[name]
    end = ends(name)
    assert end.code == code, str(end)
    assert re.fullmatch(says, (end.err.splitlines() or [""])[-1]), str(end)
    assert ("Traceback" in end.err) == (code == 1 and bool(says)), str(end)
    assert end.left == []


def test_a_run_without_streams_is_a_run_all_the_same(ends):
    assert ends("no-streams").summary["status"] == "ok"
    log = ends("no-streams").run_dir / "ranks" / "rank0" / "stdout.log"
    assert log.read_text() == ""


def test_an_error_without_a_file_is_shown_from_what_the_rank_has_printed(ends):
    assert "ValueError: not to be lost" in ends("nowhere-to-write-why").err
