"""When a script under plain python launches ranks itself, and what they are told to run."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flodl_shm.cli import plain_python
from flodl_shm.cli import run as run_command
from flodl_shm.cli.plain_python import ranks_wanted, refuse_to_launch
from flodl_shm.errors import BadConfig


@pytest.fixture(autouse=True)
def script(monkeypatch, tmp_path):
    """We are `python train.py --epochs 9` in a directory of its own, without a GPU."""
    for name in list(os.environ):
        if name.startswith("FLODL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "9"])
    be_main(monkeypatch, file=str(tmp_path / "train.py"))


def be_main(monkeypatch, *, file=None, spec=None):
    main = SimpleNamespace(__spec__=spec)
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)


def have_gpus(monkeypatch, count):
    for module in (plain_python, run_command):
        monkeypatch.setattr(module, "usable_cuda_devices", lambda visible: count)


@pytest.mark.parametrize(
    ("name", "value", "devices"),
    [
        ("FLODL_RANKS", "3", ("cpu",) * 3),
        ("FLODL_RANKS", "auto", ("cpu",) * 2),
        ("FLODL_NPROC_PER_NODE", "2", ("cpu",) * 2),
        ("FLODL_DEVICES", "cpu,cpu", ("cpu",) * 2),
        ("FLODL_CONFIG", "ranks.toml", ("cpu",) * 4),
        ("FLODL_RANKS", "1", None),
        ("FLODL_DEVICES", "cpu", None),
        ("FLODL_CONFIG", "epochs.toml", None),
        ("FLODL_RANKS", "", None),
        ("FLODL_EPOCHS", "3", None),
    ],
)
def test_the_environment_decides(monkeypatch, name, value, devices):
    Path("ranks.toml").write_text("ranks = 4")
    Path("epochs.toml").write_text("epochs = 4")
    monkeypatch.setenv(name, value)
    config = ranks_wanted()
    assert (config.devices if config else None) == devices
    if config:
        assert (config.script, config.script_args) == (Path("train.py"), ("--epochs", "9"))
        assert config.wishes.epochs is None


@pytest.mark.parametrize(("gpus", "ranks"), [(0, None), (1, None), (2, 2), (3, 3)])
def test_two_gpus_are_reason_enough(monkeypatch, gpus, ranks):
    have_gpus(monkeypatch, gpus)
    config = ranks_wanted()
    assert (config.ranks if config else None) == ranks


def test_inside_of_a_run_nobody_launches_another(monkeypatch):
    monkeypatch.setenv("FLODL_RANKS", "2")
    monkeypatch.setenv("FLODL_RUN_ID", "20300101-000000-calm-ibis")
    assert ranks_wanted() is None


def test_a_module_is_started_again_as_a_module(monkeypatch):
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text("")
    monkeypatch.setenv("FLODL_RANKS", "2")
    for name in ("pkg", "pkg.__main__"):
        be_main(monkeypatch, file="pkg/__main__.py", spec=SimpleNamespace(name=name))
        config = ranks_wanted()
        assert (config.module, config.script) == ("pkg", None)
        assert config.script_args == ("--epochs", "9")


def test_a_script_that_is_named_otherwise_is_found_by_its_file(monkeypatch, tmp_path):
    monkeypatch.setenv("FLODL_RANKS", "2")
    monkeypatch.setattr(sys, "argv", ["something else"])
    assert ranks_wanted().script == tmp_path / "train.py"


@pytest.mark.parametrize("file", [None, "<stdin>", "app.zip/__main__.py"])
def test_without_a_script_one_sentence_and_this_process(monkeypatch, file):
    monkeypatch.setenv("FLODL_RANKS", "2")
    be_main(monkeypatch, file=file)
    with pytest.warns(RuntimeWarning, match="2 ranks need a script to start again"):
        assert ranks_wanted() is None


def test_what_cannot_launch_says_so(monkeypatch):
    refuse_to_launch("start()")
    monkeypatch.setenv("FLODL_RANKS", "2")
    with pytest.raises(BadConfig, match=r"cannot launch ranks itself.*FLODL_RANKS=1"):
        refuse_to_launch("start()")
    caught = []

    def try_it():
        try:
            ranks_wanted()
        except BadConfig as error:
            caught.append(error.what)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert caught == ["run() in a thread cannot launch ranks itself"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("FLODL_RANKS", "many", "--ranks 'many' is no whole number"),
        ("FLODL_RANKS", "0", "between 1 and 256"),
        ("FLODL_CONFIG", "nowhere.toml", "cannot be read"),
        ("FLODL_TRACE", "f", "is not available in this version"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, name, value, sentence):
    monkeypatch.setenv("FLODL_RANKS", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(BadConfig, match=sentence):
        ranks_wanted()


def test_a_dry_run_ends_the_script(monkeypatch, capsys):
    monkeypatch.setenv("FLODL_RANKS", "2")
    monkeypatch.setenv("FLODL_DRY_RUN", "1")
    with pytest.raises(SystemExit):
        ranks_wanted()
    assert "dry run of train.py on 2 ranks" in capsys.readouterr().out
