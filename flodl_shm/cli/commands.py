"""The commands beside `run`: small ones here, those of a later version declared and refused."""

from __future__ import annotations

import click
import msgspec

from flodl_shm.cli.options import not_here

# name -> what it will be for
LATER_COMMANDS = {
    "doctor": "Check this machine: devices, memory, versions.",
    "trace": "Turn a run's journal into a trace for a viewer.",
    "report": "Tell a finished run on one page.",
    "plan": "Run the coordinator on an imagined rig.",
    "bench": "Measure this machine.",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def clean(as_json: bool) -> int:
    """Remove shared memory that dead runs of yours left behind.

    Live runs hold a lock on theirs and are never touched. Every start does the same. Run
    directories stay.
    """
    from flodl_shm.shm import janitor

    removed = janitor.sweep()
    if as_json:
        click.echo(msgspec.json.encode({"schema": 1, "removed": removed}))
    else:
        for name in removed:
            click.echo(f"removed {name}")
        click.echo(f"{len(removed)} leftovers removed" if removed else "nothing to remove")
    return 0


def later_command(name: str, purpose: str) -> click.Command:
    """A command that takes anything and says that it is not there yet."""

    @click.command(
        name,
        help=f"{purpose} Not in this version.",
        short_help=f"(later) {purpose}",
        context_settings={"ignore_unknown_options": True},
    )
    @click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(as_json: bool, args: tuple[str, ...]) -> int:
        raise not_here(f"flodl-shm {name}")

    return command
