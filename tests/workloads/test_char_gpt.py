"""The small GPT: a causal model with one table of characters, and its learning rate."""

from __future__ import annotations

import pytest
import torch

from flodl_shm.workloads import char_gpt


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


def test_the_learning_rate_warms_up_and_decays():
    assert char_gpt.warm_up(0) < char_gpt.warm_up(50) < char_gpt.warm_up(99)
    assert char_gpt.warm_up(99) == char_gpt.warm_up(500) == char_gpt.PEAK_LR
    assert char_gpt.warm_up(4000) == pytest.approx(char_gpt.PEAK_LR / 2, rel=0.01)
