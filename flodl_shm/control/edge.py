"""Where an order between two windows stands: right after the newest round issued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flodl_shm.ids import Rank, Round, Row


@dataclass(frozen=True, slots=True)
class Edge:
    """Orders given now are read by a rank that holds exactly the consensus of round `after`.

    A rank's orders are in order: what is put into its queue after the grant of a round and before
    the next one is read between the two, wherever the rank is now.
    """

    after: Round
    epoch: int  # of that round
    committed: Round  # the newest round that is in the consensus
    living: Mapping[Rank, Row]
    fastest: Callable[[], Rank]
