"""Names for the plain integers that must not be mixed up. No behaviour."""

from __future__ import annotations

from typing import NewType

Rank = NewType("Rank", int)  # 0 .. world_size - 1, stable over a rank's incarnations
Row = NewType("Row", int)  # the cells of one incarnation of a rank; never reused in a run
Slot = NewType("Slot", int)  # the memory of one model replica; reused by a later incarnation
Round = NewType("Round", int)  # one reduce; 1, 2, ...; 1 spreads the initial state
Nanos = NewType("Nanos", int)  # time.monotonic_ns(), comparable between processes of one host
