"""Environment variables that look like options and are none: a misspelt one says so."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from flodl_shm.cli.options import ENVIRONMENT_PREFIX, RunOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import click

# Set for ranks by the launcher, or read by tests of this package.
OURS: Final = ("FLODL_RUN_", "FLODL_FAILPOINTS")


def strangers(environment: Mapping[str, str], parameters: Iterable[click.Parameter]) -> list[str]:
    """A sentence for each FLODL_ name that no option reads, with the nearest one that is read."""
    known = [
        name
        for one in parameters
        if isinstance(one, RunOption) and isinstance(one.envvar, list)
        for name in one.envvar
    ]
    told = []
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or name.startswith(OURS):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        told.append(f"the environment variable {name} is no option and has no effect{guess}")
    return told
