"""Runs with faults in them: the environment that arms them, and that each has really struck."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Faults:
    """Injections for one run, as proc/failpoints.py reads them. `assert_fired` after it."""

    def __init__(self, place: Path, spec: str) -> None:
        place.mkdir()
        self._place, self.spec = place, spec
        token = secrets.token_hex(16)
        (place / "token").write_text(token)
        self.env = {
            "FLODL_FAILPOINTS": spec,
            "FLODL_FAILPOINTS_DIR": str(place),
            "FLODL_FAILPOINTS_TOKEN": token,
        }

    def hits(self, part: str) -> list[str]:
        """The lines of one injection of the spec."""
        file = self._place / "hits"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(f"{part} in ")]

    def assert_fired(self) -> None:
        """A fault that has not struck proves nothing."""
        for part in self.spec.split(";"):
            assert self.hits(part.strip()), f"{part.strip()} did not fire"
