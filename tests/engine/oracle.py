"""One process that repeats a recorded training: who trained which picks, and how it was averaged.

Reads a journal and nothing else of the run. Every rank that a round counts starts from the
consensus before it, steps through the picks its grant gave it as far as it came, and is averaged
by its mass. Deaths are in the journal: what a dead rank did counts where the round says so.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from oracle_script import BATCH, data, loss_of, model, sgd

from flodl_shm.control.messages import BuildArena, Committed, Grant, Seat
from flodl_shm.obs import journal
from flodl_shm.train import kernels
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.kernels import Mix, even_stride
from flodl_shm.train.seeds import seed_everything

if TYPE_CHECKING:
    from pathlib import Path

CLOSE = 1e-6  # parameters here are of the order of one


class Oracle:
    """The consensus of a run, round after round: `params`, flat, float32."""

    def __init__(self, seed: int) -> None:
        seed_everything(seed)
        self._seed = seed
        self._net = model()
        self._data = data()
        self.params = self._flat()
        self._consumed: dict[int, int] = defaultdict(int)  # by row
        self.steps = 0

    def commit(self, done: Committed, grants: dict[int, Grant]) -> None:
        """Repeat one round."""
        replicas, masses, slots = [], [], []
        for rank in done.contributors:
            replica = self._train(grants[rank], done.picks[str(rank)], done.steps[str(rank)])
            if done.mass[str(rank)]:
                replicas.append(replica)
                masses.append(done.mass[str(rank)])
                slots.append(seat_of(grants[rank]).slot)
        if replicas:
            self.params = mean_of(replicas, Mix(tuple(slots), tuple(masses)))

    def _train(self, grant: Grant, picks: int, steps: int) -> np.ndarray:
        """The replica of a rank that consumed so many picks of its grant."""
        row = seat_of(grant).row
        order = permutation(len(self._data), seed=self._seed, epoch=grant.epoch)
        queue = PickQueue(grant.spans, order, skip=self._consumed[row] - grant.after)
        self._consumed[row] += picks
        self._load(self.params)
        optimizer = sgd(self._net.parameters())
        batches = [queue.take(BATCH) for _ in range(-(-picks // BATCH))]
        assert sum(map(len, batches)) == picks, f"a grant of fewer picks than {picks}: {grant}"
        assert len(batches) == steps, f"{steps} steps for {picks} picks"
        for batch in batches:
            optimizer.zero_grad()
            loss_of(self._net, self._data[torch.from_numpy(batch)]).backward()
            optimizer.step()
        self.steps += steps
        return self._flat()

    def _flat(self) -> np.ndarray:
        with torch.no_grad():
            return torch.cat([p.reshape(-1) for p in self._net.parameters()]).numpy().copy()

    def _load(self, flat: np.ndarray) -> None:
        torch.nn.utils.vector_to_parameters(
            torch.from_numpy(flat.copy()), list(self._net.parameters())
        )


def seat_of(grant: Grant) -> Seat:
    """The place of the rank that the grant is for."""
    return next(seat for seat in grant.roster if seat.rank == grant.rank)


def mean_of(replicas: list[np.ndarray], mix: Mix) -> np.ndarray:
    """Weighted, by the kernel a rank would choose, and held against a mean in float64.

    Any other order of the same sum ends some ulps beside after a hundred rounds, since each round
    is off to the same side: shares of a third do not add up to one.
    """
    if len(replicas) == 1:
        return replicas[0]
    sources, out = [torch.from_numpy(one) for one in replicas], torch.empty(len(replicas[0]))
    kernels.mean_of(mix)(torch.stack(sources).t() if even_stride(mix.slots) else sources, out)
    exact = np.average(np.array(replicas, dtype=np.float64), axis=0, weights=mix.weights)
    assert np.abs(out.numpy() - exact).max() <= CLOSE, f"a mean of {mix} is off"
    return out.numpy()


def repeat(path: Path) -> Oracle:
    """The whole training that the journal at `path` records."""
    oracle, grants = None, defaultdict(dict)
    for record in journal.read(path, only=(BuildArena, Grant, Committed)):
        match getattr(record, "message", None):
            case BuildArena(plan=plan):
                oracle = Oracle(plan.seed)
            case Grant() as grant:
                grants[grant.round][grant.rank] = grant
            case Committed() as done:
                oracle.commit(done, grants.pop(done.round))
    assert oracle is not None, "the journal knows of no training"
    return oracle
