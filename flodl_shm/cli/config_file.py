"""`--config FILE.toml`: options by their names, for whatever flag and environment leave unsaid.

The file becomes click's default map, so its values are parsed by the very code that parses flags.
What click would bend into shape without a word, as a text for a number, is refused here. Only a
file that was named is read.
"""

from __future__ import annotations

import difflib
import tomllib
from typing import TYPE_CHECKING, Any

import click

from flodl_shm.cli.options import RunOption
from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CONFIG = "config"  # the option itself, which no file may say


def read_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Callback of --config, which is eager: other options look their values up afterwards."""
    if value is not None:
        options = [one for one in ctx.command.params if isinstance(one, RunOption)]
        ctx.default_map = defaults(value, _load(value), options)
    return value


def defaults(path: Path, said: dict[str, Any], options: Iterable[RunOption]) -> dict[str, Any]:
    """Parameter name -> value for click. Raises BadConfig on the first entry that cannot be."""
    known = {name[2:]: one for one in options for name in one.opts if name.startswith("--")}
    del known[CONFIG]
    found: dict[str, Any] = {}
    for key, value in said.items():
        written = key.replace("_", "-")
        option = known.get(written)
        if option is None or option.name is None:
            raise BadConfig(f"{path}: there is no option {key!r}{_nearest(written, known)}")
        if option.name in found:
            raise BadConfig(f"{path} says {option.flag} twice, the second time as {key!r}")
        found[option.name] = _taken(path, key, value, option)
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise BadConfig(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"--config {path} is no TOML: {error}") from None


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _taken(path: Path, key: str, value: Any, option: RunOption) -> Any:
    """The value as the command line would have it; a list where the option takes one."""
    if option.multiple:
        return _words(path, key, value if isinstance(value, list) else [value])
    if option.listed and isinstance(value, list):
        return ",".join(_words(path, key, value))
    is_real, is_whole = option.type is click.FLOAT, option.type is click.INT or option.count
    if option.is_flag:
        right, wanted = isinstance(value, bool), "true or false"
    elif is_real or is_whole:
        right = not isinstance(value, bool) and isinstance(value, int | float if is_real else int)
        wanted = "a number" if is_real else "a whole number"
    else:
        return _word(path, key, value)
    if not right:
        raise _wrong(path, key, value, wanted)
    return value


def _words(path: Path, key: str, values: list[Any]) -> list[str]:
    return [_word(path, f"an entry of {key}", value) for value in values]


def _word(path: Path, key: str, value: Any) -> str:
    """A text, or a number, which stands for its digits."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(path, key, value, "a text or a number")
    return str(value)


def _wrong(path: Path, key: str, value: Any, wanted: str) -> BadConfig:
    kinds = {dict: "a table", list: "a list", bool: str(value).lower()}
    return BadConfig(f"{path}: {key} is {kinds.get(type(value), repr(value))}, not {wanted}")
