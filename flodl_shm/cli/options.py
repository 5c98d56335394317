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
GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
ENVIRONMENT_PREFIX = "FLODL_"


class RunOption(click.Option):
    """An option in a section of --help, which FLODL_<OPTION> can set too."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        section: str,
        neutral: str = "",
        listed: bool = False,
        **attrs: Any,
    ) -> None:
        longs = [name for name in names if name.startswith("--")]
        attrs["envvar"] = [environment_name(name) for name in longs]
        super().__init__(names, **attrs)
        self.section = section
        self.listed = listed  # values with commas between them: a list in a config file
        self.neutral = neutral  # of an option not built: the one value that asks for nothing
        self.flag = longs[0]


class SectionedCommand(click.Command):
    """A command whose --help lists options under headings, in the order of their declaration.

    Options end after -m MODULE, as they do under python: what follows is the module's.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say it in click's own words."""
        return super().parse_args(ctx, self._module_ends_options(args))

    def _module_ends_options(self, args: list[str]) -> list[str]:
        options = {
            name: one for one in self.params if isinstance(one, click.Option) for name in one.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            word = args[at]
            name, equals, _ = word.replace("_", "-").partition("=")
            option = options.get(name)
            at += 1
            if option is not None and not (option.is_flag or option.count or equals):
                at += 1  # the next word is its value
            if name == "--module" or word.startswith("-m"):
                return [*args[:at], "--", *args[at:]]
        return args

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
