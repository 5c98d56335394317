"""Options from a TOML file: who wins, what lists become, and what is refused in one sentence."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flodl_shm.cli.main import main, main_run


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """No FLODL_ variable of whoever runs the tests, no GPU, a directory of its own."""
    for name in list(os.environ):
        if name.startswith("FLODL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


@pytest.fixture
def launched(monkeypatch):
    """Put a launcher in place that keeps the config."""
    fake = SimpleNamespace(config=None)

    def launch(config):
        fake.config = config
        return 0

    monkeypatch.setitem(sys.modules, "flodl_shm.engine.launch", SimpleNamespace(launch=launch))
    return fake


def say(text, name="f.toml"):
    Path(name).write_text(text)


EVERYTHING = """
nproc-per-node = 2
devices = ["cpu", "cpu"]
workload = "paced"
step_ms = [20, 40.5]
picks = 90
policy = "cadence"
epochs = 3
batch-size = [4, 8]
seed = 9
gamma = 1
overhead_target = 0.1
speed-hint = "1:2.5"
slow = ["1:2.5", "0:3@1"]
grace = 7
run-dir = "elsewhere"
name = "trial"
show-ranks = "all"
verbose = 2
json = true
restarts = 2
max-failures = 1
on-death = "continue"
"""


def test_every_kind_of_value_reaches_its_field(launched):
    say(EVERYTHING)
    assert main_run(["--config", "f.toml"]) == 0
    config, wishes = launched.config, launched.config.wishes
    assert (config.devices, config.workload) == (("cpu", "cpu"), "paced")
    assert config.workload_options == {"step_ms": (20.0, 40.5), "picks": 90}
    assert (wishes.policy, wishes.epochs, wishes.batch_size) == ("cadence", 3, (4, 8))
    assert (wishes.seed, wishes.gamma, wishes.overhead_target) == (9, 1, 0.1)
    assert wishes.speed_hint == (1, 2.5)
    assert [str(one) for one in config.slow] == ["1:2.5", "0:3@1"]
    assert (config.grace_s, config.run_root, config.name) == (7, Path("elsewhere"), "trial")
    assert (config.show_ranks, config.verbose, config.as_json) == ("all", 2, True)
    assert config.config_file == Path("f.toml")
    assert config.sources["epochs"] == config.sources["ranks"] == config.sources["json"] == "config"
    assert config.sources["anchor"] == "default"


def test_flag_then_environment_then_file(launched, monkeypatch):
    say("epochs = 1\nseed = 1\nranks = 4\nslow = '3:2'")
    monkeypatch.setenv("FLODL_SEED", "2")
    monkeypatch.setenv("FLODL_EPOCHS", "2")
    assert main(["run", "--epochs", "3", "--config=f.toml", "train.py"]) == 0
    config = launched.config
    assert (config.wishes.epochs, config.wishes.seed, config.ranks) == (3, 2, 4)
    assert [str(one) for one in config.slow] == ["3:2"]
    told = [config.sources[name] for name in ("epochs", "seed", "ranks", "slow")]
    assert told == ["flag", "environment", "config", "config"]


def test_the_environment_can_name_the_file_and_nothing_else_is_read(launched, monkeypatch):
    say("epochs = 5", "flodl.toml")
    assert main_run([]) == 0
    assert launched.config.wishes.epochs is None
    monkeypatch.setenv("FLODL_CONFIG", "flodl.toml")
    assert main_run([]) == 0
    assert launched.config.wishes.epochs == 5


def test_dry_run_shows_the_source(capsys):
    say("batch_size = 16")
    assert main_run(["--dry-run", "--json", "--config", "f.toml"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert options["batch-size"] == {"value": 16, "source": "config"}
    assert options["config"] == {"value": "f.toml", "source": "flag"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch = 3", "f.toml: there is no option 'epoch'; did you mean 'epochs'?"),
        ("batchsize = 3", "there is no option 'batchsize'; did you mean 'batch-size'?"),
        ("xyzzy = 3", "f.toml: there is no option 'xyzzy'"),
        ("config = 'g.toml'", "there is no option 'config'"),
        ("script = 'train.py'", "there is no option 'script'"),
        ("epochs = ", "--config f.toml is no TOML: "),
        ("name = '\udcff'", "--config f.toml is no TOML: "),
        ("epochs = '3'", "f.toml: epochs is '3', not a whole number"),
        ("epochs = 2.0", "f.toml: epochs is 2.0, not a whole number"),
        ("epochs = true", "f.toml: epochs is true, not a whole number"),
        ("gamma = 'x'", "f.toml: gamma is 'x', not a number"),
        ("quiet = 1", "f.toml: quiet is 1, not true or false"),
        ("verbose = true", "f.toml: verbose is true, not a whole number"),
        ("name = true", "f.toml: name is true, not a text"),
        ("name = ['a']", "f.toml: name is a list, not a text"),
        ("step-ms = [[1], 2]", "f.toml: an entry of step-ms is a list, not a text or a number"),
        ("slow = [true]", "f.toml: an entry of slow is true, not a text"),
        ("[train]\nepochs = 3", "f.toml: there is no option 'train'"),
        ("[name]\nepochs = 3", "f.toml: name is a table, not a text"),
        ("run-dir = 'a'\nrun_dir = 'b'", "f.toml says --run-dir twice, the second time as"),
        ("ranks = 2\nnproc_per_node = 3", "f.toml says --ranks twice"),
        ("policy = 'fast'", "'fast' is not one of"),
        ("epochs = 0", "epochs is 0"),
        ("guard = 'msf'", "--guard msf is not available in this version"),
        ("outer = 'slowmo'", "--outer slowmo is not available"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_2(launched, capsys, text, sentence):
    Path("f.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert main_run(["--config", "f.toml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert launched.config is None


@pytest.mark.parametrize("name", ["nowhere.toml", "."])
def test_a_file_that_cannot_be_read(launched, capsys, name):
    assert main_run(["--config", name]) == 2
    assert f"error: --config {name} cannot be read: " in capsys.readouterr().err
    assert launched.config is None
