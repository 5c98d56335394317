"""Loaders of the user's own inside of ranks: they work, they go with their rank, they are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

# The scripts' other neighbour: data that workers read.
LOADING = r'''
import gc, logging, signal, threading, time
from multiprocessing.synchronize import SemLock
from pathlib import Path
from torch.utils.data import DataLoader, Dataset, Subset
from base import *


class Points(Dataset):
    """Sample i is (i / 64, its square)."""
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.tensor([i / 64])
        return x, x * x


class Anew:
    """Every batch comes from a loader of its own."""
    def __init__(self, data, **options):
        self.data, self.options = data, {"num_workers": 2, **options}

    def __len__(self):
        return len(self.data)

    def get_batch(self, indices):
        chosen = Subset(self.data, indices.tolist())
        (batch,) = DataLoader(chosen, batch_size=len(indices), **self.options)
        return batch


class Ahead(Dataset):
    """A thread reads ahead through one loader, whose workers stay."""
    def __init__(self, data, **options):
        self.data, self.options = data, options
        self.samples, self.news = {}, threading.Condition()
        self.thread = None

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if self.thread is None:
            self.thread = threading.Thread(target=self.read, daemon=True)
            self.thread.start()
        with self.news:
            assert self.news.wait_for(lambda: i in self.samples, 60), "nothing came"
            return self.samples[i]

    def read(self):
        self.loader = DataLoader(
            self.data, batch_size=None, num_workers=2, persistent_workers=True, **self.options
        )
        for i, sample in enumerate(self.loader):
            with self.news:
                self.samples[i] = sample
                self.news.notify_all()


def note_names():
    """Write down the semaphores that this process and its workers share, as files."""
    locks = [one._semlock.name for one in gc.get_objects() if isinstance(one, SemLock)]
    held = [f"/dev/shm/sem.{name[1:]}" for name in locks if name]
    Path(f"names{RANK}").write_text("\n".join(held))


def parents(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Doing:
    """A step that does something besides, from its n-th batch on."""
    def __init__(self, number, act):
        self.left, self.act = number, act

    def __call__(self, model, batch):
        self.left -= 1
        if self.left < 0:
            self.act()
        return mse(model, batch)


def learn(data, **more):
    return train(model=lambda: nn.Linear(1, 1), dataset=data, **more)
'''

FORKED = """\
from loading import *

class Noisy(Points):
    def __getitem__(self, i):
        logging.warning("sample %s", i)
        return super().__getitem__(i)

def chatter():
    while True:
        logging.warning("busy")
        time.sleep(0.001)

logging.basicConfig()
threading.Thread(target=chatter, daemon=True).start()
learn(Anew(Noisy()), batch_size=8, epochs=3)
"""

AHEAD = """\
from loading import *

def die():
    if RANK == 1:
        note_names()
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    data = Ahead(Points(), multiprocessing_context="forkserver")
    learn(data, train_step=Doing(5, die), epochs=20, anchor=2)
"""

LAUNCHER_KILLED = """\
from loading import *

def strike():
    note_names()
    os.kill(parents(os.getppid()), signal.SIGKILL)
    time.sleep(60)

if __name__ == "__main__":
    data = Ahead(Points(), multiprocessing_context="spawn")
    learn(data, train_step=Doing(3, strike))
"""

RAISES = """\
from loading import *

class Torn(Points):
    def __getitem__(self, i):
        if i == 40:
            raise KeyError("no picture")
        return super().__getitem__(i)

learn(Anew(Torn()))
"""

KILLED = """\
from loading import *

class Dying(Points):
    def __getitem__(self, i):
        if i == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)

if __name__ == "__main__":
    learn(Anew(Dying(), num_workers=1, multiprocessing_context="forkserver"), batch_size=64)
"""

UNGUARDED = """\
from loading import *
learn(Anew(Points(), num_workers=1, multiprocessing_context="spawn"), batch_size=64)
"""


@dataclass(frozen=True)
class Script:
    text: str
    ranks: int = 2


SCRIPTS = {
    "forked": Script(FORKED),
    "ahead": Script(AHEAD),
    "launcher-killed": Script(LAUNCHER_KILLED, ranks=1),
    "raises": Script(RAISES),
    "killed": Script(KILLED, ranks=1),
    "unguarded": Script(UNGUARDED, ranks=1),
}


@pytest.fixture(scope="module")
def ends(launches):
    """Starts all of them, waits for one."""
    started = {
        name: launches.submit(
            name,
            "--ranks",
            str(script.ranks),
            "train.py",
            files={"train.py": script.text, "loading.py": LOADING},
        )
        for name, script in SCRIPTS.items()
    }
    return lambda name: started[name].result()


def log_of(end, rank: int) -> str:
    return (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text()


def names_left(end) -> list[str]:
    """Of the names in /dev/shm that a rank noted, those that are there still."""
    noted = [name for file in end.place.glob("names*") for name in file.read_text().split()]
    assert noted, "no rank held a name: nothing was tried"
    return [name for name in noted if Path(name).exists()]


def assert_each_pick_was_done_once(end) -> None:
    for epoch in end.summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] > 0, str(end)


def test_loaders_forked_again_and_again_while_threads_log_do_not_hang(ends):
    end = ends("forked")
    assert end.code == 0, str(end)
    assert_each_pick_was_done_once(end)
    assert "sample 40" in log_of(end, 0) + log_of(end, 1)
    assert "fork()" not in log_of(end, 0)  # the warning of newer Pythons
    assert end.left == []


def test_workers_and_their_names_go_with_a_killed_rank_and_the_run_goes_on(ends):
    end = ends("ahead")
    assert end.code == 0, str(end)
    assert [death["rank"] for death in end.summary["deaths"]] == [1]
    assert_each_pick_was_done_once(end)
    assert end.left == []
    assert names_left(end) == []


def test_workers_and_their_names_go_with_a_killed_launcher(ends):
    end = ends("launcher-killed")
    assert end.code == -9, str(end)
    assert end.left == []
    assert names_left(end) == []


def test_an_error_in_a_worker_is_shown_as_the_users_traceback(ends):
    end = ends("raises")
    assert end.code == 1
    lines = end.err.splitlines()
    assert lines[-1] == "KeyError: 'no picture'", str(end)
    assert re.search(r'train\.py", line 6, in __getitem__\n', end.err), str(end)
    assert end.left == []


def test_a_killed_worker_is_named_with_its_signal_and_its_rank(ends):
    end = ends("killed")
    assert end.code == 1
    assert "rank 0 (cpu) failed first" in end.err
    assert re.fullmatch(
        r"DataLoader worker 0 \(pid \d+\) ended with signal 9 \(SIGKILL\): .*",
        end.err.splitlines()[-1],
    ), str(end)
    assert end.left == []


def test_a_script_that_a_worker_imports_does_not_train_in_there(ends):
    end = ends("unguarded")
    assert end.code == 1
    assert "ended with exit 1" in end.err.splitlines()[-1], str(end)
    assert "the script trains while a worker process imports it" in log_of(end, 0)
    assert 'if __name__ == "__main__":' in log_of(end, 0)
    assert end.left == []
