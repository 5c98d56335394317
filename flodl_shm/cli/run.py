"""`flodl-shm run`, also `python -m flodl_shm.run`: options in, a checked RunConfig out, launched.

The only place that reads the environment. Nothing here imports torch: --help, --dry-run and every
refusal answer at once.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from flodl_shm import workloads
from flodl_shm.cli import dry_run as dry
from flodl_shm.cli.devices import choose_devices
from flodl_shm.cli.options import SectionedCommand, not_here
from flodl_shm.cli.run_options import LATER_VALUES, OPTIONS
from flodl_shm.cli.strangers import strangers
from flodl_shm.cli.values import (
    parse_batch_size,
    parse_max_failures,
    parse_milliseconds,
    parse_ratios,
    parse_slow,
    parse_speed_hint,
    parse_whole,
)
from flodl_shm.control.options import Survival, Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.view import plainness
from flodl_shm.errors import BadConfig
from flodl_shm.gpu.inventory import usable_cuda_devices

RENAMED = {"as_json": "json", "args": "script-args"}  # parameters named otherwise than written
PARSED = {  # wishes whose words need reading
    "batch_size": parse_batch_size,
    "speed_hint": parse_speed_hint,
    "partition_ratios": parse_ratios,
}
SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "config"}

EPILOG = """Every option is also an environment variable, as FLODL_BATCH_SIZE; a flag wins over
it, it wins over the --config file, and that over the script's own arguments to Trainer. Options
after SCRIPT or -m MODULE are the script's.
Examples: `python -m flodl_shm.run --ranks 2 train.py`; with the second rank 2.5 times slower:
`python -m flodl_shm.run --ranks 2 --slow 1:2.5`; only look: `--dry-run`."""


@click.command(
    "run",
    short_help="Train a script, or a built-in workload, on several ranks.",
    cls=SectionedCommand,
    params=list(OPTIONS),
    epilog=EPILOG,
    context_settings={
        "allow_interspersed_args": False,  # what follows SCRIPT is the script's
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "max_content_width": 100,
    },
)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> int:
    """Train SCRIPT, or a built-in workload, on several ranks that may be unequal.

    SCRIPT runs in every rank as it would under plain python; its Trainer does the rest.
    """
    config = settle(given, sources_of(ctx))
    for sentence in strangers(os.environ, ctx.command.params):
        click.echo(f"warning: {sentence}", err=True)
    if config.dry_run:
        click.echo(_json(dry.as_object(config)) if config.as_json else dry.as_text(config))
        return 0
    from flodl_shm.engine.launch import launch

    return launch(config)


def settle(given: dict[str, Any], sources: dict[str, str]) -> RunConfig:
    """The run that was asked for, with every rule checked. Raises BadConfig or HostUnfit."""
    for name, values in LATER_VALUES.items():
        if given[name] in values:
            raise not_here(f"--{name} {given[name]}")
    what = _what_runs(given)
    devices = choose_devices(
        given["ranks"],
        given["devices"],
        gpus=usable_cuda_devices(os.environ.get("CUDA_VISIBLE_DEVICES")),
        cores=len(os.sched_getaffinity(0)),
    )
    summary = given["summary"]
    if summary is not None and not summary.absolute().parent.is_dir():
        raise BadConfig(f"--summary {summary}: there is no directory {summary.parent}")
    if summary is not None and summary.is_dir():
        raise BadConfig(f"--summary {summary} is a directory", hint="Name a file.")
    return RunConfig(
        ranks=len(devices),
        devices=devices,
        **what,
        workload_options=_workload_options(given),
        wishes=_wishes(given),
        config_file=given["config"],
        backend=given["backend"],
        start=given["start"],
        slow=parse_slow(given["slow"]),
        dead_after_s=given["dead_after"],
        stall_timeout_s=given["stall_timeout"],
        grace_s=given["grace"],
        save=given["save"],
        keep=given["keep"],
        resume=given["resume"],
        callback_timeout_s=given["callback_timeout"],
        survival=Survival(
            max_failures=parse_max_failures(given["max_failures"]),
            on_death=given["on_death"],
            restarts=given["restarts"],
            rejoin_optimizer=given["rejoin_optimizer"],
        ),
        run_root=given["run_dir"],
        name=given["name"],
        progress=given["progress"],
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        plain=plainness(os.environ.get("NO_COLOR"), os.environ.get("TERM")),
        show_ranks=given["show_ranks"],
        summary=summary,
        quiet=given["quiet"],
        verbose=given["verbose"],
        dry_run=given["dry_run"],
        as_json=given["as_json"],
        threads=_threads(os.environ.get("OMP_NUM_THREADS")),
        sources=sources,
    )


def _what_runs(given: dict[str, Any]) -> dict[str, Any]:
    """script, module or workload with the arguments, as RunConfig calls them."""
    script, args, module = given["script"], given["args"], given["module"]
    workload = given["workload"]
    if module is not None:
        if workload is not None:
            raise BadConfig(f"asked to run both -m {module} and --workload {workload}")
        _check_module(module)
        return {"module": module, "script_args": args if script is None else (script, *args)}
    if script is None:
        workload = workload or workloads.DEFAULT
        workloads.check(workload)
        return {"workload": workload}
    if workload is not None:
        raise BadConfig(f"asked to run both {script} and --workload {workload}")
    if not Path(script).is_file():
        raise BadConfig(f"there is no script {script}", hint="Paths count from where you are.")
    return {"script": Path(script), "script_args": args}


def _check_module(module: str) -> None:
    """Refuse what is not there. Ranks look for the rest of a dotted name: it imports packages."""
    top, here = module.partition(".")[0], os.getcwd()
    sys.path.insert(0, here)
    try:
        found = bool(top) and find_spec(top) is not None
    except ValueError:
        found = False
    finally:
        sys.path.remove(here)
    if not found:
        raise BadConfig(f"there is no module {module} to run", hint="Modules are sought from here.")


def _workload_options(given: dict[str, Any]) -> dict[str, int | float | tuple[float, ...]]:
    options: dict[str, int | float | tuple[float, ...]] = {}
    if given["step_ms"] is not None:
        options["step_ms"] = parse_milliseconds(given["step_ms"])
    if given["picks"] is not None:
        options["picks"] = given["picks"]
    return options


def _wishes(given: dict[str, Any]) -> Wishes:
    # Some wishes are the engine's own, and no option says them.
    words = {name: given[name] for name in Wishes.__struct_fields__ if name in given}
    for name, parse in PARSED.items():
        if words[name] is not None:
            words[name] = parse(words[name])
    return Wishes(**words)


def sources_of(ctx: click.Context) -> dict[str, str]:
    """Where each option's value came from, by the option's name as it is written."""
    told = {}
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        written = RENAMED.get(name, name.replace("_", "-"))
        told[written] = SOURCES.get(source.name if source else "", "default")
    if os.environ.get("OMP_NUM_THREADS"):
        told["threads"] = "OMP_NUM_THREADS"
    return told


def _threads(word: str | None) -> int | None:
    """OMP_NUM_THREADS; of a list, one number per level of nesting, the first. Empty is not set."""
    return parse_whole(word.split(",")[0], "OMP_NUM_THREADS") if word else None


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
