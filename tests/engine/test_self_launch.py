"""`python train.py` that launches its own ranks: what runs where, what run() gives or raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

# One run that ends well, one that fails and is caught, one in which rank 0 is killed. Whoever comes
# by a mark writes it down.
FOUR = """
import json, signal
from base import *

def mark(words):
    with open("marks", "a") as file:
        file.write(f"{RANK} {words}\\n")

def score(model, data):
    return 7.0

steps = 0

def dies(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return mse(model, batch)

def raises(model, batch):
    raise KeyError("in the step")

class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

mark("begins")
told = []
try:
    state = train(model=Normed, eval_fn=score, eval_dataset=data(), epochs=3)
    total = state.params["0.weight"].sum().item()
    told.append([state.status, state.global_step, state.evaluation, total])
    told.append(sorted(state.buffers))
    state.load_into(Normed())
    mark("first")
    try:
        train(train_step=raises)
    except fl.FlodlError as error:
        told.append([type(error).__name__, error.what])
    mark("second")
    state = train(train_step=dies, policy="sync", epochs=3)
    told.append([state.status, state.global_step])
    mark("third")
finally:
    with open(f"told-{RANK}-{len(told)}.json", "w") as file:
        json.dump([*told, sys.argv, sys.path[0]], file)
print("the end", RANK)
"""

STOPPED = """
import signal, time
from pkg.base import *

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 6:
        server = open(f"/proc/{os.getppid()}/stat").read()
        os.kill(int(server.rpartition(")")[2].split()[1]), getattr(signal, sys.argv[1]))
    time.sleep(0.01)
    return mse(model, batch)

print("state:", train(train_step=step, epochs=10_000).status, RANK, signal.getsignal(2).__name__)
"""
MODULE = {"pkg/__init__.py": "", "pkg/train.py": STOPPED}
PLAIN = {"FLODL_RANKS": "2", "FLODL_PROGRESS": "none", "FLODL_SHOW_RANKS": "all"}


@pytest.fixture(scope="module")
def ends(launches):
    """All scripts of this file, by name."""
    module = ("-m", "pkg.train")
    two = PLAIN | {"FLODL_RANKS": "", "FLODL_DEVICES": "cpu,cpu"}
    started = {
        "four": launches.submit(
            "four", "train.py", "a", "--b", files={"train.py": FOUR}, env=PLAIN, plain=True
        ),
        "stopped": launches.submit("stopped", *module, "SIGINT", files=MODULE, env=two, plain=True),
        "killed": launches.submit("killed", *module, "SIGKILL", files=MODULE, env=two, plain=True),
    }
    return lambda name: started[name].result()


def told(end, rank, count):
    return json.loads((end.place / f"told-{rank}-{count}.json").read_text())


def test_run_gives_the_state_and_raises_what_ended_the_ranks(ends):
    end = ends("four")
    assert end.code == 0, str(end)
    first, buffers, second, third, argv, path = told(end, -1, 4)
    assert first[:3] == ["ok", 48, 7.0]
    assert buffers == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert second[0] == "RankFailed"
    assert "KeyError: 'in the step'" in second[1]
    assert third[0] == "ok"
    assert (argv, path) == (["train.py", "a", "--b"], str(end.place))
    assert end.left == []


def test_each_rank_answers_what_was_before_and_leaves_after_its_own_run(ends):
    marks = (ends("four").place / "marks").read_text().splitlines()
    times = {
        words: [marks.count(f"{rank} {words}") for rank in (-1, 0, 1)]
        for words in ("begins", "first", "second", "third")
    }
    assert times == {
        "begins": [1, 3, 3],
        "first": [1, 2, 2],
        "second": [1, 1, 1],
        "third": [1, 0, 0],
    }
    assert "the end -1" in ends("four").out
    assert "the end 0" not in ends("four").out
    # Rank 1 of the third launch has answered the first run and the second one's error.
    ours, theirs = told(ends("four"), -1, 4), told(ends("four"), 1, 3)
    assert theirs[:3] == ours[:3]
    assert theirs[3:] == ours[4:]


def test_the_lowest_rank_that_is_left_writes_the_state(ends):
    end = ends("four")
    runs = sorted((end.place / "runs").glob("2*"))
    states = [(run / "state.safetensors").is_file() for run in runs]
    assert states == [True, False, True]
    deaths = json.loads((runs[2] / "summary.json").read_text())["deaths"]
    assert [death["rank"] for death in deaths] == [0]


def test_a_first_signal_finishes_the_window_and_run_returns(ends):
    end = ends("stopped")
    assert end.code == 0, str(end)
    assert "state: stopped -1 default_int_handler" in end.out
    assert "state: stopped 0" not in end.out
    assert end.left == []


def test_ranks_end_with_a_killed_script(ends):
    end = ends("killed")
    assert end.code == -9, str(end)
    assert end.left == []


def test_the_state_file_gives_back_what_it_was_given(tmp_path):
    import torch

    from flodl_shm.errors import HostUnfit
    from flodl_shm.train.state import TrainedState
    from flodl_shm.train.state_file import load_state, save_state

    path = Path(tmp_path) / "state.safetensors"
    params = {"a/b": torch.randn(2, 3), "scalar": torch.tensor(2.0, dtype=torch.float64)}
    buffers = {"count": torch.tensor(3), "half": torch.ones(0, dtype=torch.bfloat16)}
    for value in (None, 0.1, float("nan")):
        save_state(TrainedState(params, buffers, "stopped", 5, value), path)
        state = load_state(path)
        assert (state.status, state.global_step) == ("stopped", 5)
        assert str(state.evaluation) == str(value)
        for mine, theirs in ((params, state.params), (buffers, state.buffers)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
            assert all(mine[name].dtype == theirs[name].dtype for name in mine)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]
    path.write_bytes(b"nonsense")
    with pytest.raises(HostUnfit, match="cannot read the trained state"):
        load_state(path)
    with pytest.raises(HostUnfit, match="cannot write the trained state"):
        save_state(state, tmp_path / "nowhere" / "state")
