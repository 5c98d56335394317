"""`flodl-net`: the command for running across hosts, which is not available yet."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

SENTENCE = "running across hosts is not available yet; flodl-shm runs on one host"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def net(args: tuple[str, ...]) -> int:
    """Run one training across several hosts (not available yet)."""
    raise BadConfig(SENTENCE)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    try:
        net.main(args=argv, prog_name="flodl-net", standalone_mode=False)
    except BadConfig as error:
        print(f"error: {error.sentence()}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
