"""The file every benchmark writes: what ran where, one object per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.bench import host
from flodl_shm.obs.run_dir import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA = 1


def write_report(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows of one benchmark, with the machine they were measured on.

    Raises HostUnfit, with the path, when it cannot be written.
    """
    write_json(path, {"schema": SCHEMA, "host": host.describe(), "rows": list(rows)})
