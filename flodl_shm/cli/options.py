"""How an option of `run` is declared: section, environment name, and whether it is built yet.

Every option of the contract is declared, so that --help is complete and nobody's script breaks on
an unknown flag. One that is not built refuses whatever value would need it, in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

LATER = "Not in this version"
GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
ENVIRONMENT_PREFIX = "FLODL_"


class RunOption(click.Option):
    """An option in a section of --help, which FLODL_<OPTION> can set too."""

    def __init__(
        self, names: Sequence[str], *, section: str, neutral: str = "", **attrs: Any
    ) -> None:
        longs = [name for name in names if name.startswith("--")]
        attrs["envvar"] = [environment_name(name) for name in longs]
        super().__init__(names, **attrs)
        self.section = section
        self.neutral = neutral  # of an option not built: the one value that asks for nothing
        self.flag = longs[0]


class SectionedCommand(click.Command):
    """A command whose --help lists options under headings, in the order of their declaration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One definition list per section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):
                continue  # arguments stand in the usage line
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "section", "Help")
                sections.setdefault(heading, []).append(record)
        later = sections.pop(LATER, [])
        for heading, records in [*sections.items(), (LATER, later)]:
            with formatter.section(heading):
                formatter.write_dl(records)


def environment_name(flag: str) -> str:
    """--batch-size -> FLODL_BATCH_SIZE."""
    return ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def working(*names: str, section: str, **attrs: Any) -> RunOption:
    """An option that is built."""
    return RunOption(names, section=section, **attrs)


def later(*names: str, does: str, neutral: str = "", **attrs: Any) -> RunOption:
    """An option that is not built yet; `neutral` is the one value it may be given."""
    attrs |= {"help": does, "expose_value": False, "callback": _refuse}
    return RunOption(names, section=LATER, neutral=neutral, **attrs)


def not_here(what: str, instead: str = "") -> BadConfig:
    """The one sentence for everything the contract names and this version lacks."""
    return BadConfig(f"{what} is not available in this version", hint=instead)


def _refuse(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    assert isinstance(parameter, RunOption)  # only `later` sets this callback
    name = parameter.name
    if name is None or ctx.get_parameter_source(name) not in GIVEN:
        return value
    said = parameter.flag if isinstance(value, bool) else f"{parameter.flag} {_text(value)}"
    if not parameter.neutral:
        raise not_here(said)
    if value != parameter.neutral:
        raise not_here(said, f"Only {parameter.flag} {parameter.neutral} is.")
    return value


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
