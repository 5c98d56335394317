"""An edge and a plan as the tests of what is done at edges need them."""

from __future__ import annotations

from flodl_shm.control.checkpoint_meta import CheckpointMeta
from flodl_shm.control.edge import Edge
from flodl_shm.control.options import Settled, Wishes
from flodl_shm.control.plan import settle
from flodl_shm.ids import Rank, Round, Row


def plan_of(ranks: int = 2, **wishes: object) -> Settled:
    said = Wishes(**{"can_save": True, "batch_size": 1, **wishes})  # type: ignore[arg-type]
    return settle(said, Wishes(), world_size=ranks, samples=100)


def edge(after: int, *living: int, committed: int = 0, epoch: int = 0) -> Edge:
    return Edge(
        after=Round(after),
        epoch=epoch,
        committed=Round(committed),
        living={Rank(rank): Row(rank) for rank in living},
        fastest=lambda: Rank(max(living)),
    )


def meta_of(**facts: object) -> CheckpointMeta:
    plain = {
        "save_reason": "checkpoint", "epoch": 1, "epochs": 3, "global_step": 7, "reduce": 5,
        "world_size": 2, "ranks": (0, 1), "seed": 0, "policy": "cadence", "batch_sizes": (1, 1),
        "samples": 100, "augment": 1, "tail": "drop", "digest": "d", "names": ("a", "b"),
    }  # fmt: skip
    return CheckpointMeta(**{**plain, **facts})  # type: ignore[arg-type]
