"""The small GPT: text in windows, a causal model, a loss that falls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flodl_shm import workloads
from flodl_shm.train.job import Job
from flodl_shm.train.step import Stepper
from flodl_shm.workloads import char_gpt


def test_windows_tile_the_text_and_targets_are_shifted_by_one():
    windows = char_gpt.TextWindows(torch.arange(200))
    assert len(windows) == 3
    inputs, targets = windows.get_batch(np.array([2, 0]))
    assert inputs.tolist()[0] == list(range(128, 192))
    assert torch.equal(targets, inputs + 1)


def test_the_held_out_tail_is_not_trained_on():
    training, held_out, alphabet = char_gpt.load()
    assert len(training) > 6000
    assert len(held_out) > char_gpt.SCORED_WINDOWS
    assert 64 < alphabet < 256
    assert char_gpt.read_text() == char_gpt.read_text()


def test_no_character_sees_the_future():
    torch.manual_seed(0)
    model = char_gpt.CharGpt(50)
    codes = torch.randint(50, (1, 64))
    changed = codes.clone()
    changed[0, 40] = (codes[0, 40] + 1) % 50
    before, after = model(codes), model(changed)
    assert torch.allclose(before[0, :40], after[0, :40], atol=1e-6)
    assert not torch.allclose(before[0, 40], after[0, 40])


def test_the_head_is_the_embedding():
    model = char_gpt.CharGpt(50)
    assert model.head.weight is model.characters.weight


def test_the_loss_falls_from_that_of_a_guess():
    job = Job(
        **{
            name: value
            for name, value in workloads.build("char-gpt").items()
            if name in ("model", "optimizer", "train_step", "dataset", "eval_fn", "eval_dataset")
        }
    )
    torch.manual_seed(0)
    model = job.build_model(torch.device("cpu"))
    stepper = Stepper(model, job.build_optimizer(model), job.train_step, max_grad_norm=1.0)
    losses = []
    for start in range(0, 60 * 16, 16):
        stepper.step(job.dataset.get_batch(np.arange(start, start + 16)))
        losses.append(stepper.take_losses()[0])
    assert losses[0] == pytest.approx(math.log(103), rel=0.1)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert job.eval_fn(model, job.eval_dataset) > -losses[0]
    assert model.training


def test_the_learning_rate_warms_up_and_decays():
    assert char_gpt.warm_up(0) < char_gpt.warm_up(50) < char_gpt.warm_up(99)
    assert char_gpt.warm_up(99) == char_gpt.warm_up(500) == char_gpt.PEAK_LR
    assert char_gpt.warm_up(4000) == pytest.approx(char_gpt.PEAK_LR / 2, rel=0.01)
