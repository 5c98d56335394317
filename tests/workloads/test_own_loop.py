"""Every workload trained by a loop of the user's own: the same bits as by run(), on one device."""

from __future__ import annotations

import pytest
import torch

import flodl_shm as fl
from flodl_shm.train.data.source import as_source
from flodl_shm.workloads import NAMES, build


class First:
    """The first samples of a dataset."""

    def __init__(self, dataset, count):
        self.source, self.count = as_source(dataset), count

    def __len__(self):
        return self.count

    def get_batch(self, indices):
        return self.source.fetch(indices)


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_ones_own_trains_what_run_trains(name):
    options = {"step_ms": (0.1,), "picks": 12} if name == "paced" else {}

    def trainer():
        given = build(name, **options)
        size = given["batch_size"] = 1 if name == "paced" else 4
        given["dataset"] = First(given["dataset"], 3 * size)
        return fl.Trainer(**given | {"epochs": 2, "policy": "sync", "eval_fn": None,
                                     "eval_dataset": None}), given["train_step"]  # fmt: skip

    managed = trainer()[0].run()
    own, train_step = trainer()
    with own.worker() as w:
        for _ in w.plans():
            for batch in w.batches():
                loss = train_step(w.model, batch)
                loss.backward()
                w.step(loss)
    assert w.state.global_step == managed.global_step == 6
    everything = managed.params | managed.buffers
    assert everything
    for key, tensor in (w.state.params | w.state.buffers).items():
        assert torch.equal(tensor, everything[key]), key
