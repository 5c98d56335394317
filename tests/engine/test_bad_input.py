"""What cannot run, and what fails while it runs: the exit code, and one clear word at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.procs

SECONDS = 60  # from the command to its end on a busy machine; an idle one needs three


@dataclass(frozen=True)
class Case:
    """A command, how it ends, and what the last line on stderr says."""

    code: int
    says: str  # a regular expression
    script: str = ""
    words: tuple[str, ...] = ("--ranks", "2", "train.py")
    files: dict[str, str] = field(default_factory=dict)
    traceback: bool = False  # of the user's code, instead of a sentence
    place: str = ""  # the last file and line of it
    fresh: bool = False  # by an interpreter of its own


def raised(says: str, place: str, script: str, **more) -> Case:
    """The user's code raised: exit 1, its traceback last."""
    return Case(1, says, script, traceback=True, place=place, **more)


def returned(value: str, says: str) -> Case:
    """train_step returned something that is no loss."""
    step = f"def my_step(model, batch):\n    return {value}\n"
    script = f"from base import *\n\n{step}\ntrain(train_step=my_step)"
    says = rf"TypeError: train_step my_step \(.*/train\.py:3\) {says}: it must return the loss, .*"
    return Case(1, says, script, traceback=True)


def words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


CASES = {
    # ---- the model, the data, the loss
    "no-parameters": Case(
        2,
        r"error: the model \(ReLU\) has no parameters. There is nothing to train; .*",
        "from base import *\ntrain(model=nn.ReLU)",
    ),
    "loss-vector": returned(
        "model(batch[0]).squeeze()", r"returned a tensor of shape \(4,\) and torch.float32"
    ),
    "loss-whole": returned("torch.tensor(1)", r"returned a tensor of torch.int64"),
    "loss-none": returned("None", "returned NoneType"),
    "loss-number": returned("1.5", "returned float"),
    "loss-without-gradient": Case(
        1,
        r"TypeError: train_step <lambda> \(.*/train.py:2\) returned a loss that depends on no .*",
        "from base import *\ntrain(train_step=lambda model, batch: torch.tensor(1.0))",
        traceback=True,
    ),
    "empty-dataset": Case(
        2,
        r"error: the dataset \(TensorDataset\) is empty: its length is 0\. .* \(rank \d\)",
        "from base import *\ntrain(dataset=data(0))",
    ),
    "small-dataset": Case(
        2,
        r"error: the dataset has 7 samples, fewer than 2 ranks x batch size 4 = 8\. .*--batch.*",
        "from base import *\ntrain(dataset=data(7))",
    ),
    "different-models": Case(
        2,
        r"error: ranks 0 and 1 differ: the model has param 1.weight 1x4 float32 on one, "
        r"param 1.weight 1x5 float32 on the other\. .*",
        "from base import *\ntrain(lambda: nn.Sequential(nn.ReLU(), nn.Linear(4 + RANK, 1)))",
    ),
    "different-data": Case(
        2,
        r"error: ranks 0 and 1 differ: the dataset has 64 samples on one, 65 on the other\. .*",
        "from base import *\ntrain(dataset=data(64 + RANK))",
    ),
    "arena-too-large": Case(
        3,
        r"error: no shared memory for the arena: \d{13,} bytes wanted, \d+ bytes free in /dev/shm, "
        r"\d+ bytes of memory available .*",
        """\
from base import *

class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1).expand(1 << 40))

train(model=Huge)
""",
    ),
    # ---- the command line
    "unknown-workload": Case(
        2,
        r"error: there is no workload 'nope'. Choose one of char-gpt, .*",
        words=words("--workload nope"),
    ),
    "unknown-policy": Case(
        2, r"error: .*'fast' is not one of 'sync', 'cadence'.*", words=words("--policy fast")
    ),
    "unknown-device": Case(
        2, r"error: --devices names 'tpu:0'. A device is cpu or .*", words=words("--devices tpu:0")
    ),
    "absent-device": Case(
        3, r"error: --devices names cuda:7, but torch could use 0 .*", words=("--devices", "cuda:7")
    ),
    "slow-rank-that-is-not-there": Case(
        2,
        r"error: --slow 5:2 names rank 5, but there are 2 ranks\. Ranks count from 0\.",
        words=words("--workload paced --ranks 2 --slow 5:2"),
    ),
    "no-script": Case(2, r"error: there is no script train\.py\. .*"),
    "run-dir-in-a-file": Case(
        3,
        r"error: cannot write the run directory under .*/base\.py/runs: Not a directory\. "
        r"Choose another with --run-dir DIR\.",
        words=words("--workload paced --run-dir base.py/runs"),
    ),
    "run-dir-refused-by-the-system": Case(
        3,
        r"error: cannot write the run directory under /proc/runs: .*",
        words=words("--workload paced --run-dir /proc/runs"),
    ),
    # ---- the script
    "raises-at-import": raised(
        "ZeroDivisionError: division by zero", "train.py:2", "x = 0\n1 / x", fresh=True
    ),
    "syntax-error": raised("SyntaxError: .*", "train.py:2", "import os\nx = = 1\n"),
    "syntax-error-next-door": raised(
        "SyntaxError: .*", "other.py:1", "import other", files={"other.py": "x = = 1"}
    ),
    "raises-in-one-rank": raised(
        r"KeyError: 'label'",
        "train.py:8",
        """\
from base import *

steps = 0
def step(model, batch):
    global steps
    steps += 1
    if RANK == 1 and steps == 3:
        raise KeyError("label")
    return mse(model, batch)

train(train_step=step, epochs=1000)
""",
    ),
    "caught-and-run-again": raised(
        "KeyError: 'caught'",
        "train.py:5",
        """\
from base import *

def step(model, batch):
    if RANK == 1:
        raise KeyError("caught")
    return mse(model, batch)

try:
    train(train_step=step)
except KeyError:
    train()
""",
    ),
    "raises-after-the-training": raised(
        "RuntimeError: too late",
        "train.py:3",
        "from base import *\ntrain()\nraise RuntimeError('too late')",
    ),
    "refused-after-the-training": Case(
        2,
        "error: the model does not fit the trained state: parameter 'weight' has shape .* "
        r"Load into a model of the same architecture\. \(rank \d\)",
        "from base import *\ntrain().load_into(nn.Linear(4, 2))",
    ),
    "never-trains": Case(
        2,
        r"error: every rank ended without training\. The script must call Trainer\(.*\.run\(\)\.",
        "print('nothing to do')",
    ),
    "exit-code": Case(
        1,
        r"error: the script ended with sys\.exit\(3\) \(rank \d, .*/train\.py:2\)",
        "import sys\nsys.exit(3)",
    ),
    "exit-text": Case(
        1,
        r"error: no data here \(rank \d, .*/train\.py:2\)",
        "import sys\nsys.exit('no data here')",
    ),
    "text-of-the-error-raises": raised(
        "Odd: <exception str.. failed>",
        "train.py:3",
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
    ),
    "megabyte-of-text": raised(
        r"ValueError: begin x{100,}\.\.\. \(.*/train\.py:1\)",
        "",
        "raise ValueError('begin ' + 'x' * 1_000_000)",
    ),
    "an-exit-handler-that-waits": raised(
        "RuntimeError: the cause",
        "train.py:4",
        """\
import multiprocessing, time
multiprocessing.set_start_method("fork")
multiprocessing.Process(target=time.sleep, args=(1000,)).start()
raise RuntimeError("the cause")
""",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ends(request, launches):
    """Starts the wanted cases, waits for one of them."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    started = {}
    for name in CASES:
        if name in wanted:
            case = CASES[name]
            files = case.files | ({"train.py": case.script} if case.script else {})
            started[name] = launches.submit(name, *case.words, files=files, fresh=case.fresh)
    return lambda name: started[name].result()


@pytest.mark.parametrize("name", CASES)
def test_it_ends_soon_with_one_clear_word(ends, name):
    case, end = CASES[name], ends(name)
    assert end.code == case.code, str(end)
    lines = end.err.splitlines()
    assert re.fullmatch(case.says, lines[-1]), str(end)
    assert end.seconds < SECONDS
    assert end.left == []
    assert end.err.count("error: ") == (0 if case.traceback else 1), str(end)
    assert len(end.err) < 20_000
    if case.traceback:
        frames = re.findall(r'^ +File ".*/(\w+\.py)", line (\d+)', end.err, re.MULTILINE)
        rank = re.search(r"^rank (\d) \(cpu\) failed first$", end.err, re.MULTILINE)[1]
        assert f"failed: rank {rank} failed" in end.out
        assert not case.place or ":".join(frames[-1]) == case.place, str(end)
    else:
        assert len(lines) == 1, str(end)


@pytest.mark.parametrize("name", ["raises-in-one-rank", "raises-after-the-training"])
def test_a_failure_is_in_the_files(ends, name):
    end = ends(name)
    assert end.summary["status"] == "failed"
    rank = 1 if name == "raises-in-one-rank" else 0
    assert (end.run_dir / "ranks" / f"rank{rank}" / "error.json").is_file()
    log = (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text()
    assert "Traceback (most recent call last)" in log


def test_a_traceback_begins_in_the_script(ends):
    end = ends("raises-in-one-rank")
    assert re.search(r'last\):\n  File ".*/train\.py", line 11, in <module>\n', end.err), str(end)
    assert "rank 1 (cpu) failed first" in end.err
