"""Every setting of a run with its value and who said it: for --dry-run and for run.json.

Until the ranks have spoken, what a script may say shows the default it would replace. This module
must not know how a setting is asked for on a command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.messages import BuildArena, Ready
from flodl_shm.control.options import Wishes
from flodl_shm.control.plan import DEFAULTS
from flodl_shm.engine.saving import flags_of
from flodl_shm.errors import HostUnfit

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.messages import Message
    from flodl_shm.control.options import Settled
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.obs.run_dir import RunDir

SCRIPT_OR_DEFAULT = "script or default"
# Settled by the launcher itself, or said under a name of their own.
NO_OPTIONS = ("can_save", "save_at_end", "metrics_on_rank", "callback_timeout_s", "survival")


def settings(
    config: RunConfig, plan: Settled | None = None, script: Wishes | None = None
) -> dict[str, tuple[object, str]]:
    """Option -> (value, source). With `plan`, what became of the words of config and `script`."""
    told = {
        name: (value, config.sources.get(name, "default"))
        for name, value in _outside_the_plan(config).items()
    }
    for field in Wishes.__struct_fields__:
        if field in NO_OPTIONS:
            continue
        name = field.replace("_", "-")
        if getattr(config.wishes, field) is not None:
            told[name] = (getattr(config.wishes, field), config.sources.get(name, "flag"))
        elif plan is None:
            told[name] = (getattr(DEFAULTS, field), SCRIPT_OR_DEFAULT)
        else:
            is_scripts = script is not None and getattr(script, field) is not None
            told[name] = (getattr(plan, field), "script" if is_scripts else "default")
    return told


def as_options(told: dict[str, tuple[object, str]]) -> dict[str, dict[str, object]]:
    """The form both JSON views share."""
    return {name: {"value": value, "source": source} for name, (value, source) in told.items()}


class SettingsFile:
    """Writes run.json: at the start what was asked for, with the plan what has become of it."""

    def __init__(
        self, run_dir: RunDir, config: RunConfig, *, started: str, warn: Callable[[str], None]
    ) -> None:
        """Write it. `started` is wall time. Raises HostUnfit when the disk refuses."""
        self._run_dir, self._config = run_dir, config
        self._started, self._warn = started, warn
        self._script: Wishes | None = None
        self._write(settings(config))

    def feed(self, message: Message) -> None:
        """Take any event or action; the script's words and the plan are among them."""
        if isinstance(message, Ready):
            self._script = message.wishes
        elif isinstance(message, BuildArena):
            try:
                self._write(settings(self._config, message.plan, self._script))
            except HostUnfit as error:  # a full disk: the training can do without
                self._warn(str(error))

    def _write(self, told: dict[str, tuple[object, str]]) -> None:
        self._run_dir.write_settings(
            {
                "started": self._started,
                "title": self._config.title,
                "options": as_options(told),
                "wishes": flags_of(
                    self._config
                ),  # what the coordinator was given, to step it again
            }
        )


def _outside_the_plan(config: RunConfig) -> dict[str, object]:
    return {
        "config": str(config.config_file) if config.config_file else None,
        "ranks": config.ranks,
        "devices": ",".join(config.devices),
        "backend": config.backend,
        "start": config.start,
        "script": str(config.script) if config.script else None,
        "module": config.module,
        "script-args": list(config.script_args),
        "workload": config.workload,
        **{name.replace("_", "-"): value for name, value in config.workload_options.items()},
        "slow": [str(one) for one in config.slow],
        "threads": config.threads,
        "dead-after": config.dead_after_s,
        "stall-timeout": config.stall_timeout_s,
        "grace": config.grace_s,
        "max-failures": config.survival.max_failures,
        "restarts": config.survival.restarts,
        "rejoin-optimizer": config.survival.rejoin_optimizer,
        "on-death": config.survival.on_death,
        "save": str(config.save) if config.save else None,
        "keep": config.keep,
        "resume": config.resume,
        "callback-timeout": config.callback_timeout_s,
        "run-dir": str(config.run_root),
        "name": config.name,
        "progress": config.progress,
        "show-ranks": config.show_ranks,
        "summary": str(config.summary) if config.summary else None,
        "json": config.as_json,
        "quiet": config.quiet,
        "verbose": config.verbose,
    }
