"""A worker used wrongly says so and goes on; one that is left unfinished frees the others."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from flodl_shm.control.messages import Attached, Quit
from flodl_shm.errors import BadConfig
from flodl_shm.train import session as sessions
from flodl_shm.train.turnstile import Turnstile

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from own_loop import TWO, train, trainer, worker
from worker_rig import FINISH, Net, Session, job

# ---- used wrongly ----------------------------------------------------------------------------


def holding():
    own, session = worker(*TWO)
    own.next_plan()
    own.next_batch()
    return own, session


def loss_of(own):
    return own.model(torch.ones(2, 3)).mean()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda w: w.next_batch(), "next_batch.. was called before the batch at hand was stepped"),
        (lambda w: w.step(0.5), "step.. got float"),
        (lambda w: w.step(torch.ones(2)), r"a tensor of shape \(2,\) and torch.float32"),
        (lambda w: w.step(torch.tensor(1)), r"a tensor of shape \(\) and torch.int64"),
        (lambda w: w.finish(), "finish.. was called before the plans were over"),
        (lambda w: w.state, "there is no trained state yet"),
    ],
)
def test_with_a_batch_at_hand(use, words):
    own, session = holding()
    with pytest.raises(BadConfig, match=words):
        use(own)
    own.step(loss_of(own))  # nothing has happened
    assert session.link.of(Quit) == []


def test_two_steps_for_one_batch():
    own, _ = holding()
    own.step(loss_of(own))
    with pytest.raises(BadConfig, match=r"step.. was called without a batch at hand"):
        own.step(loss_of(own))


def test_batches_before_a_plan():
    own, _ = worker(*TWO)
    with pytest.raises(BadConfig, match=r"next_batch.. was called without a plan"):
        own.next_batch()
    with pytest.raises(BadConfig, match=r"batches.. was called without a plan"):
        next(own.batches())


def test_after_the_end():
    own, _ = worker(*TWO)
    train(own)
    for use in (own.next_plan, own.next_batch, lambda: own.step(loss_of(own)), own.__enter__):
        with pytest.raises(BadConfig, match="was called, but the training is over"):
            use()
    assert own.state.status == "ok"


def test_finish_twice():
    own, _ = worker(FINISH)
    assert own.next_plan() is None
    assert own.finish() is own.state
    with pytest.raises(BadConfig, match=r"finish.. was called twice"):
        own.finish()


def test_one_at_a_time_alone():
    first = trainer().worker()
    with pytest.raises(BadConfig, match="another worker is still open in this process"):
        trainer().worker()
    train(first)
    train(trainer().worker())


def test_one_at_a_time_in_a_rank(monkeypatch):
    monkeypatch.setattr(sessions, "CURRENT", Turnstile(Session(*TWO)))
    first = trainer(model=Net).worker()
    with pytest.raises(BadConfig, match="another training is still under way in this rank"):
        trainer().worker()
    with pytest.raises(BadConfig, match="another training is still under way in this rank"):
        trainer().run()
    train(first)
    assert first.state.status == "ok"


def test_a_model_that_cannot_be_built_leaves_nothing_open():
    def broken():
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        trainer(model=broken).worker()
    train(trainer().worker())


# ---- left unfinished -------------------------------------------------------------------------


def test_an_exception_comes_through_and_the_others_are_told():
    failures = []
    own, session = worker(*TWO, leave=failures.append)
    error = ZeroDivisionError("no batch is that small")

    def use():
        with own as w:
            w.next_plan()
            raise error

    with pytest.raises(ZeroDivisionError):
        use()
    (said,) = session.link.of(Quit)
    assert said.why == "ZeroDivisionError: no batch is that small"
    assert failures == [error]
    with pytest.raises(BadConfig, match="has left the training unfinished"):
        _ = own.state
    with pytest.raises(BadConfig, match="has left the training unfinished"):
        own.next_plan()


def test_leaving_with_plans_to_come_is_told_too():
    own, session = worker(*TWO)
    with pytest.warns(RuntimeWarning, match="before the plans were over"), own as w:
        w.next_plan()
    assert len(session.link.of(Quit)) == 1


def test_a_worker_that_is_dropped_is_out():
    failures = []
    own, session = worker(*TWO, leave=failures.append)
    own.next_plan()
    del own
    gc.collect()
    (said,) = session.link.of(Quit)
    assert said.why == "the script dropped its worker before the plans were over"
    assert isinstance(failures[0], BadConfig)


def test_a_worker_that_has_ended_may_be_dropped():
    own, session = worker(*TWO)
    train(own)
    del own
    gc.collect()
    assert session.link.of(Quit) == []


def test_what_is_left_of_the_model_is_out_of_the_arena():
    net = Net()
    own, session = worker(*TWO, the_job=job(model=net), floats=8192)
    own.next_plan()
    weight = net.out.weight.detach().clone()
    own.__exit__(KeyError, KeyError("x"), None)
    session.slot.fill_(float("nan"))
    assert torch.equal(net.out.weight, weight)


def test_a_forked_copy_of_the_process_ends_nobodys_training(monkeypatch):
    own, session = worker(*TWO)
    own.next_plan()
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    own.__exit__(KeyError, KeyError("in a loader"), None)
    assert session.link.of(Quit) == []


def test_nobody_passes_after_a_rank_that_left(monkeypatch):
    monkeypatch.setattr(sessions, "CURRENT", Turnstile(Session(*TWO)))
    own = trainer(model=Net).worker()
    with pytest.warns(RuntimeWarning, match="before the plans were over"), own:
        own.next_plan()
    with pytest.raises(BadConfig, match="has left the training unfinished"):
        trainer().run()
    assert Attached in [type(report) for report in own._worker._session.link.sent]
