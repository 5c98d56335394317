"""What goes on after a stop is what would have gone on without it; what does not fit is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from saving_rig import (
    CADENCE,
    SYNC,
    Desk,
    checkpoints,
    hash_of,
    is_exact,
    meta,
    of_step,
    only,
    trace,
)

pytestmark = pytest.mark.procs

SIGNALS = {"SIGTERM": "of_step", "SIGINT": "stepped"}
QUIET = ("--progress", "line")


def whole(desk, rate):
    """Uninterrupted, for comparison."""
    return desk.run(f"whole-{rate}", *SYNC, *QUIET, "train.py", f"rate={rate}")


def stopped(desk, signal):
    """Stopped in the second epoch, gone on with."""
    stem = desk.stem(signal)
    words, rate = (*SYNC, *QUIET, "--save", str(stem)), f"rate={SIGNALS[signal]}"
    first = desk.run(f"{signal}-1", *words, "train.py", rate, f"{signal}@17")
    saved = only(stem, checkpoints(stem)[-1], f"{signal}-saved")
    second = desk.run(f"{signal}-2", *words, "--resume", "auto", "train.py", rate)
    return SimpleNamespace(first=first, second=second, stem=stem, saved=saved)


def asked(desk):
    """A checkpoint by SIGUSR1 and on; then from that checkpoint."""
    stem = desk.stem("asked")
    first = desk.run("asked-1", *SYNC, "--save", str(stem), "train.py", "SIGUSR1@17")
    saved = only(stem, checkpoints(stem)[0], "asked-saved")
    second = desk.run("asked-2", *SYNC, "--resume", str(saved), "train.py")
    return SimpleNamespace(first=first, second=second, stem=stem, saved=saved)


def bordered(desk):
    """One epoch more each time: begun anew at every border."""
    words = (*SYNC, "--save", str(desk.stem("bordered")), "--resume", "auto")
    return [
        desk.run(f"bordered-{epochs}", *words, "train.py", f"epochs={epochs}")
        for epochs in (1, 2, 3)
    ]


def grown(desk):
    """With 2 ranks, then 3, then 1, each stopped in the middle of an epoch but the last."""
    stem, ends, began = desk.stem("grown"), [], []
    for ranks, word in ((2, "SIGTERM@16"), (3, "SIGTERM@9"), (1, "sleep=0")):
        words = (*CADENCE, "--ranks", str(ranks), "--save", str(stem), "--resume", "auto")
        ends.append(
            desk.run(f"grown-{ranks}", *words, "--epochs", "4", "train.py", word, "sleep=0.002")
        )
        began.append(meta(checkpoints(stem)[-1]))
    return SimpleNamespace(ends=ends, saved=began)


def finished(desk, first):
    """What becomes of a training that is done, when it is asked for again."""
    stem = only(first.stem, checkpoints(first.stem)[-1], "finished")
    before = hash_of(stem.parent)
    words = (*SYNC, "--resume", str(stem))
    more = {
        "again": desk.run("finished-again", *words, "train.py"),
        "fewer": desk.run("finished-fewer", *words, "train.py", "epochs=2"),
        "more": desk.run("finished-more", *words, "train.py", "epochs=5"),
    }
    return SimpleNamespace(**more, is_untouched=hash_of(stem.parent) == before)


def broken(desk, first):
    """The newest checkpoint has lost a byte."""
    stem = only(first.saved, checkpoints(first.saved)[0], "broken")
    newest = stem.with_name("model-000000000099")
    shutil.copytree(checkpoints(stem)[0], newest)
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "serial": 99}))
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    end = desk.run("broken", *SYNC, "--save", str(stem), "--resume", "auto", "train.py")
    return SimpleNamespace(end=end, newest=newest)


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def prepared(desk, first):
    """A checkpoint with pickles beside its files, under names others load."""
    stem = only(first.saved, checkpoints(first.saved)[0], "prepared")
    mark = desk.root / "prepared-mark"
    for name in ("optimizer-rank0.pt", "pytorch_model.bin", "meta.pkl", "data.pkl", "rng.pth"):
        (checkpoints(stem)[0] / name).write_bytes(pickle.dumps(Evil(mark)))
    end = desk.run("prepared", *SYNC, "--resume", str(stem), "train.py")
    return SimpleNamespace(end=end, mark=mark)


def newer(folder):
    text = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**text, "schema": 7}))


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


# name -> (words of the script, what is done to the copy, what the sentence says)
MISFITS = {
    "seed": (("seed=6",), None, "it was made with seed 5, this run has 6"),
    "model": (("width=9",), None, "its model has param 0.weight 8x4 float32, the script's has"),
    "data": (("samples=92",), None, "it was made with a dataset of 96 samples, this run has"),
    "augment": (("augment=2",), None, "made with --augment 1, this run has 2"),
    "newer": ((), newer, "schema 7"),
    "nothing": ((), emptied, "is no checkpoint"),
}


def refused(desk, first, name):
    words, spoil, _ = MISFITS[name]
    stem = only(first.saved, checkpoints(first.saved)[0], f"misfit-{name}")
    folder = checkpoints(stem)[0]
    if spoil is not None:
        spoil(folder)
    before = hash_of(stem.parent)
    end = desk.run(f"misfit-{name}", *SYNC, "--resume", str(folder), "train.py", *words)
    return SimpleNamespace(end=end, is_untouched=hash_of(stem.parent) == before)


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory):
    """All chains of this file, by name."""
    desk = Desk(launches, tmp_path_factory.mktemp("stems"))
    started = {"asked": desk.start(asked)}
    started |= {f"whole-{rate}": desk.start(whole, rate) for rate in SIGNALS.values()}
    started |= {signal: desk.start(stopped, signal) for signal in SIGNALS}
    started |= {"grown": desk.start(grown), "bordered": desk.start(bordered)}

    def after(chain, *args):
        return desk.start(lambda desk: chain(desk, started["SIGTERM"].result(), *args))

    started |= {name: after(chain) for name, chain in AFTER.items()}
    started |= {f"misfit-{name}": after(refused, name) for name in MISFITS}
    yield lambda name: started[name].result()
    desk.close()


AFTER = {"finished": finished, "broken": broken, "prepared": prepared}


def digest_of(end):
    return end.summary["params_sha256"]


# ---- going on as if nothing had been -------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_signal_saves_and_the_run_dies_of_it(ends, signal):
    first = ends(signal).first
    assert first.code == -{"SIGTERM": 15, "SIGINT": 2}[signal], str(first)
    assert first.summary["status"] == "stopped"
    assert first.seconds < 30  # the grace
    saved = meta(checkpoints(ends(signal).saved)[0])
    assert saved["save_reason"] == "graceful_shutdown"
    assert saved["epoch"] == 1
    assert 0 < sum(to - start for start, to in saved["open_epochs"][0]["done"]) < 96


@pytest.mark.parametrize("signal", SIGNALS)
def test_stopped_and_resumed_under_sync_is_the_uninterrupted_run_bit_for_bit(ends, signal):
    """Parameters, order of the data, rates, momentum, random numbers and losses, on each rank."""
    chain, one = ends(signal), ends(f"whole-{SIGNALS[signal]}")
    assert one.code == chain.second.code == 0, str(chain.second)
    for rank in (0, 1):
        there = trace(one, rank)
        assert len(there) == 36
        parts = [trace(chain.first, rank), trace(chain.second, rank)]
        assert all(parts)
        assert [*parts[0], *parts[1]] == there
    assert digest_of(chain.second) == digest_of(one)
    is_exact(chain.second.summary, epochs=3)
    assert chain.second.summary["loss"] == pytest.approx(one.summary["loss"])


def test_begun_anew_at_every_epochs_border_is_one_long_run(ends):
    *parts, last = ends("bordered")
    assert last.code == 0, str(last)
    for rank in (0, 1):
        there = [line for end in (*parts, last) for line in trace(end, rank)]
        assert there == trace(ends("whole-of_step"), rank)
    assert digest_of(last) == digest_of(ends("whole-of_step"))
    assert "afresh" in parts[0].out  # there was none to begin with, which is said


def test_ranks_draw_different_numbers_before_and_after_a_resume(ends):
    chain = ends("SIGTERM")
    for end in (chain.first, chain.second):
        assert not {line[3] for line in trace(end, 0)} & {line[3] for line in trace(end, 1)}


def test_sigusr1_saves_and_the_training_goes_on_unchanged(ends):
    first, one = ends("asked").first, ends("whole-of_step")
    assert first.code == 0, str(first)
    assert digest_of(first) == digest_of(one)
    assert "SIGUSR1: a checkpoint is made at the next window's edge" in first.out
    reasons = [meta(folder)["save_reason"] for folder in checkpoints(ends("asked").stem)]
    assert reasons == ["signal", "end"]


def test_a_checkpoint_from_the_middle_of_an_epoch_continues_it(ends):
    chain, one = ends("asked"), ends("whole-of_step")
    assert chain.second.code == 0, str(chain.second)
    done = meta(checkpoints(chain.saved)[0])["global_step"] // 2
    assert 12 < done < 24
    for rank in (0, 1):
        assert trace(chain.second, rank) == trace(one, rank)[done:]
    assert digest_of(chain.second) == digest_of(one)
    is_exact(chain.second.summary, epochs=3)


# ---- with another number of ranks ----------------------------------------------------------------


def test_resumed_with_more_and_fewer_ranks_every_pick_is_trained_once_an_epoch(ends):
    two, three, one = ends("grown").ends
    assert (two.code, three.code, one.code) == (-15, -15, 0), f"{two}\n{three}\n{one}"
    is_exact(one.summary, epochs=4)
    trained = Counter(
        pick
        for end, ranks in ((two, 2), (three, 3), (one, 1))
        for rank in range(ranks)
        for line in trace(end, rank)
        for pick in line[0]
    )
    assert trained == dict.fromkeys(range(96), 4)


def test_the_learning_rate_goes_on_at_the_next_value_of_its_curve(ends):
    chain = ends("grown")
    for end, ranks, saved in zip(chain.ends[1:], (3, 1), chain.saved, strict=False):
        for rank in range(ranks):
            rates = [line[1] for line in trace(end, rank)]
            assert rates[0] == pytest.approx(of_step(saved["global_step"]))
            assert rates == sorted(rates, reverse=True)
    assert chain.saved[-1]["global_step"] == 4 * 96 // 4


def test_a_new_rank_takes_the_optimizer_state_of_another_and_a_random_stream_of_its_own(ends):
    three = ends("grown").ends[1]
    first = [trace(three, rank)[0] for rank in range(3)]
    assert first[2][2] == first[0][2] > 0
    assert first[1][2] not in (first[0][2], None)
    assert len({line[3] for line in first}) == 3
    assert "speeds are measured afresh" in (three.run_dir / "journal.jsonl").read_text()


# ---- nothing left, more, and what is broken ------------------------------------------------------


def test_a_finished_training_resumed_ends_well_and_trains_nothing(ends):
    chain = ends("finished")
    assert chain.again.code == 0, str(chain.again)
    assert chain.again.summary["picks_total"] == 0
    assert trace(chain.again, 0) == trace(chain.again, 1) == []
    assert digest_of(chain.again) == digest_of(ends("SIGTERM").second)
    is_exact(chain.again.summary, epochs=3)
    assert chain.is_untouched


def test_fewer_epochs_than_are_done_is_said(ends):
    end = ends("finished").fewer
    assert end.code == 0, str(end)
    assert "nothing is left to train: 3 epochs are done, 2 are asked for" in end.out


def test_more_epochs_go_on_where_the_last_one_ended(ends):
    end = ends("finished").more
    assert end.code == 0, str(end)
    is_exact(end.summary, epochs=5)
    assert end.summary["picks_total"] == 2 * 96
    assert trace(end, 0)[0][1] == pytest.approx(of_step(72))


def test_a_broken_newest_falls_back_to_the_one_before_and_says_so(ends):
    chain = ends("broken")
    assert chain.end.code == 0, str(chain.end)
    assert f"checkpoint {chain.newest} is passed over: " in chain.end.out
    assert digest_of(chain.end) == digest_of(ends("whole-of_step"))


def test_pickles_in_a_checkpoints_folder_are_never_opened(ends):
    chain = ends("prepared")
    assert chain.end.code == 0, str(chain.end)
    assert digest_of(chain.end) == digest_of(ends("whole-of_step"))
    assert not chain.mark.exists()


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_in_one_sentence_and_left_alone(ends, name):
    chain = ends(f"misfit-{name}")
    assert chain.end.code == 2, str(chain.end)
    said = [line for line in chain.end.err.splitlines() if MISFITS[name][2] in line]
    assert len(said) == 1, str(chain.end)
    assert "Traceback" not in chain.end.err
    assert chain.is_untouched
