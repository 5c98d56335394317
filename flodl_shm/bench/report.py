"""How every benchmark ends: verdicts on the screen, and a file of what ran where, row by row."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from flodl_shm.bench import host
from flodl_shm.bench.gates import verdicts
from flodl_shm.errors import FlodlError
from flodl_shm.obs.run_dir import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from flodl_shm.bench.gates import Gate

SCHEMA = 1


def write_report(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows of one benchmark, with the machine they were measured on.

    Raises HostUnfit, with the path, when it cannot be written.
    """
    write_json(path, {"schema": SCHEMA, "host": host.describe(), "rows": list(rows)})


def conclude(
    measure: Callable[[], list[dict[str, Any]]],
    target: Path | None,
    *,
    gates: Sequence[Gate] = (),
    names: Sequence[str] = (),
) -> int:
    """Measure, tell how the gates were kept, write the rows to `target` if there is one.

    `names` are the keys that name a row. The exit code: 1 if ranks ever ended with different bits,
    that of the error, which is told in a sentence, if something forbids the measurement.
    """
    try:
        rows = measure()
        for line in verdicts(gates, rows, names):
            print(line)
        if target is not None:
            write_report(target, rows)
    except FlodlError as error:
        print(f"error: {error.sentence()}", file=sys.stderr)
        return error.exit_code
    return 0 if all(row.get("identical", True) for row in rows) else 1
