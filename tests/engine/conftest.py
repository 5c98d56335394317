"""Runs of the real command line for the tests beside this file: a few at a time, watched."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S = 120.0  # no run here takes ten seconds on an idle machine; more is a hang
AFTERWARDS_S = 2.0  # nothing of a run may be there this long after its end
TOGETHER = 2
MARK = "TEST_MARK"  # a variable that every process of a run inherits
OURS = ("FLODL_", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")

# What the tests' scripts have in common; they import it as their neighbour.
BASE = """
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import flodl_shm as fl

RANK = int(os.environ.get("RANK", "-1"))


def data(count=64):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def linear():
    return nn.Linear(4, 1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def mse(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(model=linear, train_step=mse, dataset=None, **more):
    dataset = data() if dataset is None else dataset
    more = {"batch_size": 4, "epochs": 2, **more}
    return fl.Trainer(model, sgd, train_step, dataset=dataset, **more).run()
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and what it left."""

    place: Path  # it was started here
    code: int
    out: str
    err: str
    seconds: float
    left: list[int] = field(default_factory=list)  # processes that outlived it

    @property
    def run_dir(self) -> Path:
        return (self.place / "runs" / "latest").resolve()

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def __str__(self) -> str:
        return (
            f"exit {self.code} after {self.seconds:.1f} s\n{self.out[-4000:]}\n{self.err[-4000:]}"
        )


def processes_of(mark: str) -> list[int]:
    """Living processes whose environment holds `mark`, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if mark.encode() + b"\0" in environ and state != "Z":
                found.append(int(entry.name))
    return found


class Preloaded:
    """A process that runs commands one after the other without importing torch each time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, place: Path, words: tuple[str, ...], env: dict[str, str]) -> Ended:
        out, err = place / "out", place / "err"
        order = {"words": words, "cwd": str(place), "env": env, "out": str(out), "err": str(err)}
        began = time.monotonic()
        print(json.dumps(order), file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        last = threading.Timer(LIMIT_S, os.kill, (pid, signal.SIGKILL))
        last.start()
        told = json.loads(self._process.stdout.readline())
        last.cancel()
        seconds = time.monotonic() - began
        return Ended(place, told["code"], out.read_text(), err.read_text(), seconds, told["left"])

    def close(self) -> None:
        self._process.communicate()


class Launches:
    """Starts commands in directories of their own, two at a time: they are busy, not waiting."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(TOGETHER)
        self._preloaded: list[Preloaded] = []
        self._idle: queue.SimpleQueue[Preloaded] = queue.SimpleQueue()

    def submit(
        self,
        name: str,
        *words: str,
        files: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        plain: bool = False,
    ) -> Future[Ended]:
        """Run WORDS beside `files`, each of which has base.py as a neighbour.

        `fresh`: by `python -m flodl_shm.run` to the letter; else as preloaded.py says.
        `plain`: not by us at all, but as `python WORDS`.
        """
        place = self._root / name
        place.mkdir()
        for file, text in {"base.py": BASE, **(files or {})}.items():
            (place / file).parent.mkdir(exist_ok=True)
            (place / file).write_text(text)
            (place / file).with_name("base.py").write_text(BASE)
        env = self.environment(place) | (env or {})
        if fresh or plain:
            program = () if plain else ("-m", "flodl_shm.run")
            command = (sys.executable, *program, *words)
            return self._pool.submit(run_command, place, command, env)
        return self._pool.submit(self._run, place, words, env)

    def shell(self, name: str, line: str, *, files: dict[str, str] | None = None) -> Future[Ended]:
        """Run a line of shell beside `files`; in it "$@" is `python -m flodl_shm.run`."""
        place = self._root / name
        place.mkdir()
        for file, text in {"base.py": BASE, **(files or {})}.items():
            (place / file).write_text(text)
        command = ("/bin/sh", "-c", line, "sh", sys.executable, "-m", "flodl_shm.run")
        return self._pool.submit(run_command, place, command, self.environment(place))

    def close(self) -> None:
        """Wait for all of them."""
        self._pool.shutdown()
        for process in self._preloaded:
            process.close()

    @staticmethod
    def environment(place: Path) -> dict[str, str]:
        """That of the tests without what steers a run, and with a mark of this one."""
        plain = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        return plain | {MARK: str(place), "CUDA_VISIBLE_DEVICES": ""}

    def _run(self, place: Path, words: tuple[str, ...], env: dict[str, str]) -> Ended:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = Preloaded()
            self._preloaded.append(process)
        ended = process.run(place, words, env)
        self._idle.put(process)
        return ended


def run_command(place: Path, command: Sequence[str], env: dict[str, str]) -> Ended:
    """Run it there to its end."""
    began = time.monotonic()
    silent, hold = os.pipe()  # open and silent: a rank that read it would wait for ever
    process = subprocess.Popen(
        command,
        cwd=place,
        env=env,
        stdin=silent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nTEST: no end within {LIMIT_S} s"
    finally:
        os.close(silent)
        os.close(hold)
    seconds = time.monotonic() - began
    deadline = time.monotonic() + AFTERWARDS_S
    while (left := processes_of(f"{MARK}={place}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    return Ended(place, process.returncode, out, err, seconds, left)


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "flodl" in name}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Where a module's commands run. Afterwards nothing of them is left in /dev/shm."""
    before = shm_names()
    runs = Launches(tmp_path_factory.mktemp("launches"))
    yield runs
    runs.close()
    deadline = time.monotonic() + AFTERWARDS_S
    while shm_names() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert shm_names() <= before
