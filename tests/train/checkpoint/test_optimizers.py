"""Every optimizer and scheduler of torch goes on bit for bit where it was saved."""

from __future__ import annotations

import pytest
import torch
from restore_rig import Net, alike, bring_back, save, step
from torch import nn

from flodl_shm.train.seeds import seed_everything

optim = torch.optim
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
}
if hasattr(optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda p: optim.Adafactor(p, lr=0.01)


def grouped(make):
    """The same with two groups of settings of their own."""

    def build(params):
        params = list(params)
        return make([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}])

    return build


CASES = OPTIMIZERS | {
    f"{name}, 2 groups": grouped(make) for name, make in OPTIMIZERS.items() if name != "LBFGS"
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_goes_on_bit_for_bit(stem, name):
    make = CASES[name]
    seed_everything(3)
    model = Net()
    optimizer = make(model.parameters())
    for _ in range(4):
        step(model, optimizer)
    folder = save(stem, model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    seed_everything(99)
    other = Net()
    fresh = make(other.parameters())
    assert bring_back(folder, other, fresh).rng
    for _ in range(3):
        step(other, fresh)
    assert alike(other.state_dict(), model.state_dict())
    assert alike(fresh.state_dict(), optimizer.state_dict())
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("name", ["SparseAdam", "Muon"])
def test_optimizers_that_do_not_take_every_parameter_go_on_too(stem, name):
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")

    def build():
        layer = nn.Embedding(6, 3, sparse=True) if name == "SparseAdam" else nn.Linear(3, 4, False)
        return layer, getattr(optim, name)(layer.parameters(), lr=0.01)

    def train(layer, optimizer):
        optimizer.zero_grad()
        x = torch.tensor([1, 4]) if name == "SparseAdam" else torch.randn(2, 3)
        layer(x).pow(2).sum().backward()
        optimizer.step()

    layer, optimizer = build()
    for _ in range(3):
        train(layer, optimizer)
    folder = save(stem, layer, optimizer)
    train(layer, optimizer)
    other, fresh = build()
    bring_back(folder, other, fresh)
    train(other, fresh)
    assert alike(other.state_dict(), layer.state_dict())


class Master(torch.optim.Optimizer):
    """Keeps a float32 copy of a half precision parameter, as many do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["master"] = p.float()
            state["master"].sub_(p.grad.float(), alpha=0.001)
            p.copy_(state["master"])


def test_a_state_of_a_wider_dtype_than_its_parameter_keeps_its_bits(stem):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).bfloat16()
    optimizer = Master(layer.parameters())
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    folder = save(stem, layer, optimizer)
    other = nn.Linear(3, 3).bfloat16()
    fresh = Master(other.parameters())
    bring_back(folder, other, fresh)
    assert alike(fresh.state_dict(), optimizer.state_dict())


def lambdas(o):
    return optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n)


schedule = optim.lr_scheduler
SCHEDULERS = [
    lambdas,
    lambda o: schedule.StepLR(o, 2),
    lambda o: schedule.MultiStepLR(o, [2, 3, 3]),
    lambda o: schedule.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: schedule.CosineAnnealingLR(o, 10),
    lambda o: schedule.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedule.CyclicLR(o, 0.01, 0.1),
    lambda o: schedule.PolynomialLR(o),
    lambda o: schedule.SequentialLR(o, [schedule.LinearLR(o), lambdas(o)], [3]),
    lambda o: schedule.ChainedScheduler([schedule.LinearLR(o), lambdas(o)]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_a_scheduler_comes_back(stem, make):
    def build():
        layer = nn.Linear(2, 2)
        optimizer = optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        return layer, optimizer, make(optimizer)

    layer, optimizer, scheduler = build()
    for _ in range(4):
        scheduler.step()
    folder = save(stem, layer, optimizer, scheduler=scheduler.state_dict())
    other, fresh, again = build()
    again.load_state_dict(bring_back(folder, other, fresh).scheduler)
    for _ in range(4):
        scheduler.step()
        again.step()
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
