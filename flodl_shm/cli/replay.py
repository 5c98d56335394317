"""`flodl-shm replay`: step a recorded run again and say where it comes out otherwise, if so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

import flodl_shm
from flodl_shm.errors import BadConfig
from flodl_shm.obs import journal
from flodl_shm.obs.journal import Header, Record
from flodl_shm.obs.replay import Verdict, replay
from flodl_shm.obs.run_dir import JOURNAL, find_run

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = 400  # characters of a message: a grant with many spans is no line for a screen


@click.command("replay", short_help="Step a run's journal again: the same decisions?")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
@click.argument("path", metavar="JOURNAL|RUN_DIR", type=click.Path(path_type=Path))
def replay_command(as_json: bool, path: Path) -> int:
    """Step a run's journal again: the same events must give the same decisions.

    Exit 0 if they do, also as far as a killed run came; 1 with the first difference. The second
    run of a script is RUN_DIR/run-2.
    """
    from flodl_shm.control.coordinator import Coordinator  # --help needs none of it

    header, records = _open(path)
    coordinator = Coordinator(header.flags, header.world_size, header.resume)
    seen: list[Record] = []
    verdict = replay(_watched(records, seen), coordinator.step)
    lasted_s = (seen[-1].at - header.started_at) / 1e9 if seen else 0.0
    if as_json:
        click.echo(msgspec.json.encode(_as_object(header, verdict, lasted_s)))
    else:
        click.echo("\n".join(_lines(header, verdict, lasted_s)))
    return 1 if verdict.difference else 0


def _open(path: Path) -> tuple[Header, Iterator[Record]]:
    """The header, and the records to come. Raises BadConfig on what is no journal."""
    file = path if path.is_file() else find_run(path) / JOURNAL
    try:
        lines = journal.read(file)
        header = next(lines, None)
    except OSError as error:
        raise BadConfig(f"cannot read {file}: {error.strerror}") from None
    if not isinstance(header, Header):
        raise BadConfig(f"{file} is empty: not even the first line was written")
    if not header.world_size:
        raise BadConfig(f"{file} does not say how many ranks there were: an older version wrote it")
    return header, (line for line in lines if isinstance(line, Record))


def _watched(records: Iterator[Record], seen: list[Record]) -> Iterator[Record]:
    """Let the newest record be seen from outside."""
    for record in records:
        seen[:] = [record]
        yield record


def _lines(header: Header, verdict: Verdict, lasted_s: float) -> list[str]:
    counted = f"{verdict.events} events, {verdict.actions} actions, {lasted_s:.1f} s"
    if verdict.difference is None:
        end = "" if verdict.is_complete else "; the journal ends before the run did"
        return [f"same: {counted}{end}"]
    parted = verdict.difference
    at_s = (parted.at - header.started_at) / 1e9
    lines = [
        f"different at record {parted.index} (line {parted.index + 2}), {at_s:.6f} s, "
        f"after {counted.rpartition(',')[0]}",
        f"  event     {_cut(parted.event)}",
        f"  expected  {_cut(parted.expected)}",
        f"  got       {_cut(parted.got)}",
    ]
    wrote = header.versions.get("flodl_shm", "")
    if wrote != flodl_shm.__version__:
        lines.append(f"  written by version {wrote or 'unknown'}, this is {flodl_shm.__version__}")
    return lines


def _as_object(header: Header, verdict: Verdict, lasted_s: float) -> dict[str, object]:
    parted = verdict.difference
    return {
        "schema": 1,
        "run_id": header.run_id,
        "same": parted is None,
        "complete": verdict.is_complete,
        "events": verdict.events,
        "actions": verdict.actions,
        "lasted_s": round(lasted_s, 6),
        "difference": None
        if parted is None
        else {
            "index": parted.index,
            "line": parted.index + 2,
            "at_s": round((parted.at - header.started_at) / 1e9, 9),
            "event": parted.event,
            "expected": parted.expected,
            "got": parted.got,
        },
    }


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)"
