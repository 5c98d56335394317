"""Runs that are stopped, saved and gone on from: a script that writes down each of its steps."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

# Each line of trace-RANK is what a step found: its picks, the rate, the momentum, the digest of
# all random states, and its loss. Words of the command line:
#   NAME@N     send that signal to the launcher at rank 0's N-th step
#   KEY=VALUE  an argument of Trainer, or of what is trained
TRACED = """
import hashlib, json, random, signal, threading, time
import numpy as np
from base import *

words = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
signals = [word.split("@") for word in sys.argv[1:] if "@" in word]
steps = 0


def launcher():
    server = open(f"/proc/{os.getppid()}/stat").read()
    return int(server.rpartition(")")[2].split()[1])


def samples(count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True), torch.arange(count))


def model():
    width = int(words.get("width", 8))
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)
    )


def momentum(params):
    global optimizer
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return optimizer


def moment():
    kept = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    return sum(float(one.double().abs().sum()) for one in kept) if kept else None


def drawn():
    states = (torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate())
    return hashlib.sha256(repr(states).encode()).hexdigest()[:12]


def step(model, batch):
    global steps
    x, y, picks = batch
    line = [picks.tolist(), optimizer.param_groups[0]["lr"], moment(), drawn()]
    random.random(), np.random.rand()
    loss = nn.functional.mse_loss(model(x), y)
    print(json.dumps([*line, float(loss.detach())]), file=trace)
    steps += 1
    for name, at in signals:
        if RANK == 0 and steps == int(at):
            os.kill(launcher(), getattr(signal, name))
    time.sleep(float(words.get("sleep", 0)))
    return loss


def of_step(position):
    return 0.05 * 0.97**position


def stepped(optimizer, world_size):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)


def low(position):
    return 1e-9


RATES = {"of_step": of_step, "stepped": stepped, "low": low}


def go(**more):
    given = {
        "dataset": samples(int(words.get("samples", 96))),
        "batch_size": 4,
        "scheduler": RATES[words.get("rate", "of_step")],
        **{key: int(words[key]) for key in ("epochs", "seed", "augment") if key in words},
        **more,
    }
    return fl.Trainer(model, momentum, step, **{"epochs": 3, "seed": 5, **given}).run()


trace = open(f"trace-{RANK}", "w", buffering=1)
"""
PLAIN = TRACED + "go()\n"
SYNC = ("--ranks", "2", "--policy", "sync")
CADENCE = ("--policy", "cadence", "--anchor", "3", "--max-anchor", "4")


def of_step(position: int) -> float:
    """The rate of the scripts at a global step."""
    return 0.05 * 0.97**position


@dataclass
class Desk:
    """Starts chains of runs; each chain has a thread, the runs of all share the machine."""

    launches: Any
    root: Path
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    def run(self, name: str, *words: str, text: str = PLAIN, **more: Any) -> Any:
        """One run to its end, in a directory of that name."""
        return self.launches.submit(name, *words, files={"train.py": text}, **more).result()

    def stem(self, name: str) -> Path:
        """Where a chain keeps its checkpoints."""
        return self.root / name / "model"

    def start(self, chain: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have it under way."""
        return self._pool.submit(chain, self, *args)

    def close(self) -> None:
        """Wait for all."""
        self._pool.shutdown()


def trace(end: Any, rank: int) -> list[list[Any]]:
    """What the rank has written down in that run."""
    return [json.loads(line) for line in (end.place / f"trace-{rank}").read_text().splitlines()]


def checkpoints(stem: Path) -> list[Path]:
    """Folders under a stem, in order of their step."""
    return sorted(stem.parent.glob(f"{stem.name}-*"))


def meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return json.loads((folder / "meta.json").read_text())


def hash_of(folder: Path) -> str:
    """Of all names, bytes and times of change below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def only(stem: Path, folder: Path, name: str) -> Path:
    """A stem beside that one which has a copy of this checkpoint alone."""
    copy = stem.parent.with_name(name)
    copy.mkdir()
    shutil.copytree(folder, copy / folder.name)
    return copy / stem.name


def is_exact(summary: dict[str, Any], epochs: int) -> None:
    """Assert that each epoch has each of its picks once."""
    assert [epoch["epoch"] for epoch in summary["coverage"]] == list(range(epochs))
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] > 0
        assert epoch["duplicated"] == epoch["missing"] == 0
