"""The part of a simulated rank that writes checkpoints in the background, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.messages import Lend, Lent, PartSaved, Save, SavedFile
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos
from flodl_shm.sim.rig import MS

if TYPE_CHECKING:
    from flodl_shm.sim.actor import Actor


class Writer:
    """What one actor's saver thread does."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._free_at = Nanos(0)

    def save(self, order: Save) -> None:
        """Copy what there is now and write it later."""
        actor, world = self._actor, self._actor.world
        if actor.holds != order.after:
            raise WeBroke(
                f"rank {actor.rank} is to save the state after round {order.after} "
                f"and holds that after {actor.holds}"
            )
        errands = world.rig.errands
        if world.rng.random() < errands.part_hangs:
            world.never_answer(order.save)
            return
        error = "no space left" if world.rng.random() < errands.part_fails else ""
        took = world.rng.expovariate(1 / (errands.write_ms * MS))
        self._free_at = Nanos(int(max(self._free_at, world.now) + took))
        world.after(self._free_at - world.now, lambda: self._written(order, error))

    def lend(self, order: Lend) -> None:
        """Copy the optimizer's state for another rank, and write it later."""
        actor, world = self._actor, self._actor.world
        error = "no space left" if world.rng.random() < world.rig.errands.part_fails else ""
        took = world.rng.expovariate(1 / (world.rig.errands.write_ms * MS))
        told = Lent(actor.rank, actor.row, order.row, error)

        def written() -> None:
            if actor.state != "dead":
                world.report(actor.rank, told)

        world.after(took, written)

    def _written(self, order: Save, error: str) -> None:
        actor = self._actor
        if actor.state == "dead" or actor.dies_at("writing"):
            return
        names = [f"optimizer-rank{actor.rank}"] + ["model"] * order.has_model
        files = tuple(SavedFile(name, 1, str(order.after)) for name in names)
        part = PartSaved(
            actor.rank, actor.row, order.save, files=() if error else files, error=error
        )
        actor.world.report(actor.rank, part)
