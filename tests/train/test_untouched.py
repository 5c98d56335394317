"""After an evaluation a model and the random numbers are as they were, whatever it did."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flodl_shm.control.messages import Evaluate, Evaluated, Finished
from flodl_shm.ids import Rank
from flodl_shm.train.replica import Replica
from flodl_shm.train.untouched import untouched

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from worker_rig import FINISH, Net, Session, attach, grant, job, run

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Tied and frozen parameters, a buffer that overlaps itself, one that is whole, one private."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = nn.Linear(3, 3)
        self.again = self.inner
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner.weight
        self.tied.bias.requires_grad_(False)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("private", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.nan = nn.Parameter(torch.tensor(float("nan")))
        self.later = nn.LazyLinear(2)


def forget_eval_mode(model):
    model.norm(torch.ones(4, 3))


def write_in_place(model):
    with torch.no_grad():
        model.inner.weight.zero_()
        model.tied.bias.data.fill_(3)
        model.wide.untyped_storage().fill_(0)
        model.private += 1


def bind_anew(model):
    model.inner.weight = nn.Parameter(torch.zeros(3, 3))
    model.norm = nn.Identity()
    model.tied.bias.data = torch.zeros(5)
    model.none = torch.ones(1)
    model.extra = nn.Parameter(torch.ones(2))
    del model.private


def freeze(model):
    model.inner.requires_grad_(False)
    model.tied.bias.requires_grad_(True)
    model.eval()


@pytest.mark.parametrize("act", [forget_eval_mode, write_in_place, bind_anew, freeze])
@pytest.mark.parametrize("raises", [False, True])
def test_a_model_is_as_it_was(act, raises):
    def facts():
        tensors = {
            name: (id(one), one.data_ptr(), one.stride(), one.requires_grad, one.tolist())
            for name, one in (*model.named_parameters(), *model.named_buffers())
            if not nn.parameter.is_lazy(one)
        }
        modes = {name: (id(one), one.training) for name, one in model.named_modules()}
        return repr((tensors, modes))

    model = Odd()
    before = facts()
    try:
        with untouched(model, CPU):
            act(model)
            assert facts() != before
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    assert facts() == before


def test_random_numbers_go_on_where_they_were():
    def draw():
        return torch.rand(1).item(), np.random.random(), random.random()

    model = nn.Linear(1, 1)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    first = draw()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    with untouched(model, CPU):
        draw()
    assert draw() == first


def test_a_rank_that_has_scored_ends_with_the_others_parameters():
    """BatchNorm moves its statistics in the evaluation, since that asks for train mode."""

    def hash_of(eval_fn):
        floats = Replica(Net()).layout.grid.floats
        orders = (attach(), grant(1, 0), grant(2, 2, ((0, 8),)), Evaluate(Rank(1), 1), FINISH)
        session = Session(*orders, floats=floats)
        run(session, job(eval_fn=eval_fn, eval_dataset=torch.ones(4, 3)))
        values.extend(report.value for report in session.link.of(Evaluated))
        return session.link.of(Finished)[0].params_sha256

    values: list[float | None] = []
    moved = hash_of(lambda model, data: model.train()(data).mean().item())
    assert moved == hash_of(lambda model, data: 1.0)
    assert None not in values
