"""What comes out of a training: the same every time under sync, and as good as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.seeds import seed_everything

pytest.importorskip("sklearn", reason="the digits workloads need scikit-learn")
pytestmark = pytest.mark.procs

SYNC = ("--ranks", "2", "--policy", "sync", "--progress", "none")
SEED, SAMPLES, BATCH, EPOCHS, RANKS = 11, 96, 4, 3, 2
LR, MOMENTUM = 0.05, 0.9

# Its state is compared with a single process that sees the same global batches.
SCRIPT = f"""
from base import *

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def optimizer(params):
    return torch.optim.SGD(params, lr={LR}, momentum={MOMENTUM})

state = fl.Trainer(
    model, optimizer, mse, dataset=data({SAMPLES}), batch_size={BATCH}, epochs={EPOCHS}, seed={SEED}
).run()
torch.save(state.params, f"params-{{RANK}}.pt")
"""


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    started = {
        "cadence": launches.submit(
            "cadence",
            *["--ranks", "2", "--workload", "digits-lenet", "--epochs", "12", "--slow", "1:2.5"],
        )
    }
    for workload in ("digits-mlp", "digits-lenet"):
        for number in (1, 2):
            name = f"{workload}-{number}"
            words = ("--workload", workload, "--seed", "3", "--epochs", "2")
            started[name] = launches.submit(name, *SYNC, *words)
    started["other seed"] = launches.submit(
        "other-seed", *SYNC, *("--workload", "digits-mlp", "--seed", "4", "--epochs", "2")
    )
    started["script"] = launches.submit("script", *SYNC, "train.py", files={"train.py": SCRIPT})
    return lambda name: started[name].result()


def hash_of(end):
    assert end.code == 0, str(end)
    assert end.summary["status"] == "ok"
    return end.summary["params_sha256"]


@pytest.mark.parametrize("workload", ["digits-mlp", "digits-lenet"])
def test_the_same_seed_gives_the_same_parameters_bit_for_bit(ends, workload):
    assert hash_of(ends(f"{workload}-1")) == hash_of(ends(f"{workload}-2"))
    assert ends(f"{workload}-1").summary["loss"] == ends(f"{workload}-2").summary["loss"]


def test_another_seed_gives_others(ends):
    assert hash_of(ends("other seed")) != hash_of(ends("digits-mlp-1"))


def alone():
    """SGD in this process on the global batches of the two ranks, one after the other."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(dim=1, keepdim=True)
    seed_everything(SEED)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(SAMPLES, seed=SEED, epoch=epoch).copy())
        for picks in order.split(BATCH * RANKS):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[picks]), y[picks]).backward()
            optimizer.step()
    return dict(model.named_parameters())


def test_sync_is_training_alone_on_the_global_batches(ends):
    end = ends("script")
    hash_of(end)
    first, second = (torch.load(end.place / f"params-{rank}.pt") for rank in range(RANKS))
    expected = alone()
    assert first.keys() == second.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.detach(), rtol=0, atol=1e-5)


def test_unequal_ranks_train_a_model_with_batchnorm_as_well_as_one_device_would(ends):
    end = ends("cadence")
    assert hash_of(end)
    told = end.summary
    assert told["policy"] == "cadence"
    assert told["eval"][-1]["value"] >= 0.95
    assert [epoch["epoch"] for epoch in told["coverage"]] == list(range(12))
    for epoch in told["coverage"]:
        assert epoch["done_once"] == epoch["picks"] > 1000
        assert epoch["duplicated"] == epoch["missing"] == 0
        assert epoch["dropped"] < 64
    assert told["per_rank"][0]["picks"] > 1.3 * told["per_rank"][1]["picks"]
