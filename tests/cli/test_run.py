"""The command line of `run`: what is understood, who wins, and what is refused with which words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from flodl_shm.cli.main import main, main_run
from flodl_shm.cli.run import run, settle
from flodl_shm.control.options import Survival


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
    """Put a launcher in place that keeps the config; its `code` is what it returns."""
    fake = SimpleNamespace(code=0, config=None)

    def launch(config):
        fake.config = config
        return fake.code

    monkeypatch.setitem(sys.modules, "flodl_shm.engine.launch", SimpleNamespace(launch=launch))
    return fake


def test_without_a_word_it_trains_the_default_workload_on_two_cpu_ranks(launched):
    assert main_run([]) == 0
    config = launched.config
    assert (config.workload, config.script, config.devices) == ("char-gpt", None, ("cpu", "cpu"))
    assert all(getattr(config.wishes, name) is None for name in config.wishes.__struct_fields__)


def test_what_follows_the_script_is_the_scripts(launched):
    assert main_run(["--ranks", "3", "train.py", "--epochs", "2", "-q", "x y"]) == 0
    config = launched.config
    assert (config.script, config.script_args) == (Path("train.py"), ("--epochs", "2", "-q", "x y"))
    assert config.wishes.epochs is None
    assert not config.quiet
    assert len(config.devices) == config.ranks == 3


@pytest.mark.parametrize(
    "words",
    ["-m pkg.train --epochs 2 x", "-mpkg.train --epochs 2 x", "--module=pkg.train --epochs 2 x"],
)
def test_what_follows_a_module_is_the_modules(launched, words):
    Path("pkg").mkdir()
    Path("pkg/train.py").write_text("")
    assert main_run(["--ranks", "3", "-v", *words.split()]) == 0
    config = launched.config
    args = tuple(words.split()[words.split().index("2") - 1 :])
    assert (config.module, config.script, config.workload) == ("pkg.train", None, None)
    assert config.script_args == args
    assert (config.title, config.ranks, config.wishes.epochs) == ("pkg.train", 3, None)
    assert "pkg" not in sys.modules


def test_every_setting_reaches_its_field(launched):
    words = """--ranks 2 --devices cpu,cpu --backend shm --slow 1:2.5 --slow 0:3@1 --workload paced
        --step-ms 20,40.5 --picks 90 --policy cadence --epochs 3 --batch-size 4,8 --seed 9
        --tail keep --augment 2 --eval-every 1 --max-batch-diff 5 --speed-hint 1:2.5
        --max-grad-norm 1.5 --anchor 4 --max-anchor 40 --overhead-target 0.1 --gamma 0.5
        --dead-after 2 --stall-timeout 60 --grace 7 --run-dir elsewhere --name trial --start spawn
        --save kept/model --save-every 2 --keep 3 --resume auto --epoch-callback-rank 1
        --callback-timeout 90 --max-failures 0.5 --restarts 3 --rejoin-optimizer peer
        --progress line --show-ranks all --summary out.json -vv"""
    assert main_run(words.split()) == 0
    config = launched.config
    assert msgspec.to_builtins(config.wishes) == {
        "policy": "cadence",
        "epochs": 3,
        "batch_size": (4, 8),
        "seed": 9,
        "tail": "keep",
        "augment": 2,
        "eval_every": 1,
        "max_batch_diff": 5,
        "speed_hint": (1, 2.5),
        "anchor": 4,
        "max_anchor": 40,
        "overhead_target": 0.1,
        "gamma": 0.5,
        "max_grad_norm": 1.5,
        "save_every": 2,
        "epoch_callback_rank": "1",
    }
    assert (config.save, config.keep, config.resume) == (Path("kept/model"), 3, "auto")
    assert config.callback_timeout_s == 90
    assert config.survival == Survival(0.5, "continue", 3, "peer")
    assert [str(one) for one in config.slow] == ["1:2.5", "0:3@1"]
    assert config.workload_options == {"step_ms": (20.0, 40.5), "picks": 90}
    assert (config.dead_after_s, config.stall_timeout_s, config.grace_s) == (2, 60, 7)
    assert (config.run_root, config.name) == (Path("elsewhere"), "trial")
    assert (config.progress, config.show_ranks, config.verbose) == ("line", "all", 2)
    assert (config.summary, config.start) == (Path("out.json"), "spawn")


@pytest.mark.parametrize("words", ["--save x", "--save-every 1", "--resume auto", "train.py"])
def test_keeping_some_has_an_effect_wherever_something_may_be_saved(launched, words):
    assert main_run(["--keep", "2", *words.split()]) == 0
    assert launched.config.keep == 2


def test_underscores_and_the_torchrun_spelling_are_understood(launched):
    assert main_run(["--nproc_per_node", "4", "--batch_size=8"]) == 0
    assert launched.config.ranks == 4
    assert launched.config.wishes.batch_size == 8


def test_a_flag_wins_over_the_environment_and_sources_say_so(launched, monkeypatch):
    monkeypatch.setenv("FLODL_EPOCHS", "7")
    monkeypatch.setenv("FLODL_SEED", "3")
    monkeypatch.setenv("FLODL_NPROC_PER_NODE", "3")
    monkeypatch.setenv("FLODL_SLOW", "1:2 2:3")
    monkeypatch.setenv("FLODL_QUIET", "1")
    assert main_run(["--epochs", "2"]) == 0
    config = launched.config
    assert (config.wishes.epochs, config.wishes.seed, config.ranks) == (2, 3, 3)
    assert [str(one) for one in config.slow] == ["1:2", "2:3"]
    assert config.quiet
    assert config.sources["epochs"] == "flag"
    assert config.sources["seed"] == config.sources["ranks"] == "environment"
    assert config.sources["grace"] == "default"


@pytest.mark.parametrize("code", [0, 1, 3, 4, 70])
def test_the_exit_code_is_the_launchers(launched, code):
    launched.code = code
    assert main_run([]) == code
    assert main(["run"]) == code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--bogus", "No such option '--bogus'"),
        ("--epochs x", "'x' is not a valid integer"),
        ("--policy fast", "'fast' is not one of"),
        ("--epochs 0", "epochs is 0"),
        ("--seed -1", "seed is -1"),
        ("--seed 9223372036854775808", "is above"),
        ("--gamma nan", "gamma is nan"),
        ("--overhead-target 0.9", "overhead_target is 0.9"),
        ("--max-grad-norm 0", "max_grad_norm is 0"),
        ("--anchor 9 --max-anchor 3", "anchor 9 is greater than max_anchor 3"),
        ("--policy sync --anchor 4", "--anchor has no effect under --policy sync"),
        ("--policy sync --overhead-target 0.1", "--overhead-target has no effect under"),
        ("--picks 9", "--picks has no effect on char-gpt"),
        ("--step-ms 9 train.py", "--step-ms has no effect on train.py"),
        ("--workload paced --step-ms 9", "--step-ms has 1 entries for 2 ranks"),
        ("--workload paced --step-ms 9,0", "a step takes more than 0 ms"),
        ("--workload paced --step-ms 9;8", "is no list of milliseconds"),
        ("--workload paced --picks 0", "--picks 0: at least 1"),
        ("--workload nope", "there is no workload 'nope'"),
        ("--workload paced train.py", "asked to run both train.py and --workload paced"),
        ("nope.py", "there is no script nope.py"),
        ("-m nope.train", "there is no module nope.train to run"),
        ("-m .", "there is no module . to run"),
        ("-m pkg --workload paced", "there is no module pkg"),
        ("--workload paced -m pkg", "asked to run both -m pkg and --workload paced"),
        (".", "there is no script ."),
        ("--slow 1", "--slow '1' is not RANK:FACTOR"),
        ("--slow 1:x", "--slow '1:x' is not RANK:FACTOR"),
        ("--slow 1:0.5", "a factor is at least 1"),
        ("--slow 1:inf", "a factor is at least 1"),
        ("--slow 1:1e300", "it is 1e+06 at most"),
        ("--workload paced --step-ms 9,1e300", "1e+09 ms at most"),
        ("--slow 2:2", "--slow 2:2 names rank 2, but there are 2 ranks"),
        ("--slow 1:2 --slow 1:3", "rank 1 has a factor there already"),
        ("--ranks 0", "--ranks 0: between 1 and 256"),
        ("--ranks many", "--ranks 'many' is no whole number"),
        ("--ranks 3 --devices cpu,cpu", "--ranks 3 but --devices names 2"),
        ("--ranks cpu --devices cpu", "exclude each other"),
        ("--devices cpu,tpu:0", "--devices names 'tpu:0'"),
        ("--dead-after 0", "--dead-after 0: must be more than 0 seconds"),
        ("--stall-timeout inf", "--stall-timeout inf: must be more than 0 seconds"),
        ("--grace -1", "--grace -1: must be at least 0 seconds"),
        ("--name a/b", "cannot be part of a directory's name"),
        ("-q -v", "-q and -v exclude each other"),
        ("--summary no/where.json", "there is no directory no"),
        ("--batch-size 4,4,4", "3 batch sizes are given for 2 ranks"),
        ("--batch-size 4,x", "--batch-size 'x' is no whole number"),
        ("--speed-hint 2:3", "the speed hint names rank 2 of 2 ranks"),
        ("--speed-hint 1", "--speed-hint '1' is not RANK:TIMES"),
        ("--speed-hint 1:0.4", "says the others are 0.4 times as fast"),
        ("--partition-ratios 0.5,0.6", "sum to 1.1"),
        ("--partition-ratios a,b", "is no list of shares"),
        ("--partition-ratios 1", "1 partition ratios are given for 2 ranks"),
        ("--partition-ratios 0.5,0.5 --speed-hint 0:2", "--speed-hint has no effect beside"),
        ("--policy sync --max-batch-diff 1", "--max-batch-diff has no effect under --policy sync"),
        ("--augment 0", "augment is 0"),
        ("--eval-every -1", "eval_every is -1"),
        ("--batch-size four", "--batch-size 'four' is no whole number"),
        ("--save .", "--save .: there is no name in it"),
        ("--save a/..", "there is no name in it"),
        ("--save-every -1", "save_every is -1"),
        ("--keep 0 --save x", "--keep 0: at least 1 checkpoint stays"),
        ("--keep 2", "--keep 2 has no effect: nothing is saved"),
        ("--keep 2 --save-every 0", "--keep 2 has no effect: nothing is saved"),
        ("--resume=", "--resume names nothing"),
        ("--callback-timeout 0", "--callback-timeout 0: must be more than 0 seconds"),
        ("--callback-timeout nan", "--callback-timeout nan: must be more than 0 seconds"),
        ("--callback-timeout 1e300", "--callback-timeout 1e+300: 1e+09 seconds at most"),
        ("--ranks 3 --epoch-callback-rank 5", "names rank 5 of 3 ranks"),
        ("--max-failures 2", "--max-failures 2 has no effect with 2 ranks"),
        ("--max-failures 1.5", "max failures is 1.5 of the ranks"),
        ("--max-failures 0.0", "max failures is 0 of the ranks"),
        ("--max-failures=-1", "max failures is -1, below 0"),
        ("--max-failures few", "--max-failures 'few' is neither a number of ranks nor a part"),
        ("--restarts -1", "--restarts -1: from 0 to 1000"),
        ("--restarts 1001", "--restarts 1001: from 0 to 1000"),
        ("--restarts 1 --ranks 1", "--restarts 1 has no effect with 1 rank"),
        ("--rejoin-optimizer peer", "--rejoin-optimizer peer has no effect without --restarts"),
        ("--on-death abort --restarts 1", "--restarts 1 has no effect beside --on-death abort"),
        ("--on-death abort --max-failures 1", "--max-failures 1 has no effect beside"),
        ("--on-death whatever", "'whatever' is not one of"),
        ("--epoch-callback-rank slowest", "epoch_callback_rank is 'slowest'"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_2(launched, capsys, words, sentence):
    assert main_run(words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert out == ""
    assert launched.config is None


@pytest.mark.parametrize(
    "words",
    """--policy async|--backend nccl|--backend gloo
    |--lr-scale 2|--max-overshoot 3
    |--async-apply delta|--easgd-alpha 0.5|--outer slowmo
    |--guard msf|--lr-control on|--arena-dtype bf16
    |--trace f|--serve 8080
    |--devices GPU-3f1c""".replace("\n", "").split("|"),
)
def test_what_is_not_built_is_refused(launched, capsys, words):
    assert main_run(words.split()) == 2
    err = capsys.readouterr().err
    assert "is not available in this version" in err
    assert err.count("\n") == 1
    assert launched.config is None


def test_what_is_not_built_is_refused_from_the_environment_too(launched, monkeypatch, capsys):
    monkeypatch.setenv("FLODL_TRACE", "f")
    assert main_run([]) == 2
    assert "--trace f is not available" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["--outer none", "--arena-dtype f32", "--restarts 0", "--on-death continue", "--guard trend"],
)
def test_a_value_that_asks_for_nothing_is_fine(launched, words):
    assert main_run(words.split()) == 0


def test_dry_run_prints_every_setting_with_its_source_and_starts_nothing(launched, capsys):
    assert main_run(["--dry-run", "--ranks", "2", "--slow", "1:2.5", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["epochs", "3", "flag"] in lines
    assert "batch-size          32                       default, unless the script says it" in out
    assert ["grace", "30.0", "default"] in lines
    assert "rank 1  cpu  slow 1:2.5" in out
    assert launched.config is None
    assert not Path("runs").exists()


def test_dry_run_for_programs(capsys):
    assert main_run(["--dry-run", "--json", "--seed", "4", "train.py", "a"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["options"]["seed"] == {"value": 4, "source": "flag"}
    assert told["options"]["script"]["value"] == "train.py"
    assert told["options"]["script-args"]["value"] == ["a"]
    assert told["ranks"][1] == {"rank": 1, "device": "cpu", "slow": []}


def test_json_is_a_setting_of_the_run(launched):
    assert main_run(["--json"]) == 0
    assert launched.config.as_json
    assert launched.config.sources["json"] == "flag"


@pytest.mark.parametrize(("word", "threads"), [(None, None), ("", None), ("3", 3), ("4,2", 4)])
def test_the_users_threads_are_kept(launched, monkeypatch, word, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if word is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", word)
    assert main_run([]) == 0
    assert launched.config.threads == threads
    assert launched.config.sources.get("threads") == ("OMP_NUM_THREADS" if word else None)


@pytest.mark.parametrize("word", ["many", "0", "-2", ","])
def test_threads_that_cannot_be(launched, monkeypatch, capsys, word):
    monkeypatch.setenv("OMP_NUM_THREADS", word)
    assert main_run([]) == 2
    assert capsys.readouterr().err.startswith("error: OMP_NUM_THREADS ")
    assert launched.config is None


def test_help_lists_every_option_under_a_heading(capsys):
    assert main_run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(option.flag in out for option in run.params if hasattr(option, "flag"))
    headings = [line for line in out.splitlines() if line and line[0] != " " and line[-1] == ":"]
    assert headings[0] == "Ranks and devices:"
    assert headings[-1] == "Not in this version:"


def test_every_option_of_run_is_read_by_settle():
    """A working option that nobody reads would be a setting without effect."""

    read = set()

    class Watched(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

    with run.make_context("run", []) as context:
        given = Watched(context.params)
    settle(given, {})
    assert set(given) == read
