"""Character models: text in excerpts, a loss that falls, the same run from the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flodl_shm import Trainer, workloads
from flodl_shm.train.step import Stepper
from flodl_shm.workloads import char_text
from flodl_shm.workloads.char_rnn import CharRnn

STEPS = 60


def test_excerpts_tile_the_text_and_targets_are_shifted_by_one():
    excerpts = char_text.Excerpts(torch.arange(200))
    assert len(excerpts) == 3
    inputs, targets = excerpts.get_batch(np.array([2, 0]))
    assert inputs.tolist()[0] == list(range(128, 192))
    assert torch.equal(targets, inputs + 1)


def test_the_held_out_tail_is_not_trained_on():
    training, held_out, alphabet = char_text.load()
    assert len(training) > 6000
    assert len(held_out) > char_text.SCORED_EXCERPTS
    assert 64 < alphabet < 256
    assert char_text.read_text() == char_text.read_text()


@pytest.mark.parametrize("name", ["char-gpt", "char-rnn"])
def test_the_loss_falls_from_that_of_a_guess(name):
    job = Trainer(**workloads.build(name)).job
    torch.manual_seed(0)
    model = job.build_model(torch.device("cpu"))
    stepper = Stepper(model, job.build_optimizer(model), job.train_step, max_grad_norm=1.0)
    losses = []
    for start in range(0, STEPS * 16, 16):
        stepper.step(job.dataset.get_batch(np.arange(start, start + 16)))
        losses.append(stepper.take_losses()[0])
    assert losses[0] == pytest.approx(math.log(103), rel=0.1)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert job.eval_fn(model, job.eval_dataset) > -losses[0]
    assert model.training


def test_the_recurrent_net_sees_the_past_and_not_the_future():
    torch.manual_seed(0)
    model = CharRnn(50)
    codes = torch.randint(50, (1, char_text.CONTEXT))
    changed = codes.clone()
    changed[0, 40] = (codes[0, 40] + 1) % 50
    before, after = model(codes), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.allclose(before[0, 45], after[0, 45], atol=1e-5)


@pytest.mark.slow
def test_alone_the_recurrent_net_learns_to_spell():
    state = Trainer(**workloads.build("char-rnn") | {"epochs": 1}).run()
    assert state.evaluation > -2.0  # a guess costs 4.6 nats, the frequency of letters alone 3.3
