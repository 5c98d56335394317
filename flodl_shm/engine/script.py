"""Runs a user's script as `python script.py args` or `python -m module args` does, inside a rank
that exists already.

Not by way of runpy: it takes its `__main__` away again when the script ends, while threads and
exit handlers of the script still run, and its frames would stand in every traceback.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


def run_script(script: str, arguments: Sequence[str]) -> None:
    """argv, sys.path[0] and `__main__` as a fresh interpreter has them; `script` as it was given.

    Raises whatever the script raises, SystemExit too.
    """
    path = Path(script).absolute()  # of `__file__` and of tracebacks, as the interpreter has it
    sys.argv = [script, *arguments]
    _look_first_in(str(path.resolve().parent))
    facts = _become_main(
        {
            "__file__": str(path),
            "__cached__": None,
            "__loader__": SourceFileLoader("__main__", str(path)),
        }
    )
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, facts)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """The same for `python -m module`. Raises BadConfig where there is no such module."""
    _look_first_in(os.getcwd())
    sys.argv = ["-m", *arguments]  # what the packages around it see while they are imported
    spec, code = _find(module)
    sys.argv[0] = spec.origin or module
    facts = _become_main(
        {
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__spec__": spec,
        }
    )
    exec(code, facts)


def _look_first_in(folder: str) -> None:
    if not sys.flags.safe_path:  # under -P the first entry is the standard library's
        sys.path[0] = folder


def _become_main(facts: dict[str, Any]) -> dict[str, Any]:
    """A fresh `__main__` with these facts; its namespace."""
    main = ModuleType("__main__")
    main.__dict__.update(facts, __builtins__=builtins)
    sys.modules["__main__"] = main  # before the code runs: pickle looks classes up here
    return main.__dict__


def _find(module: str) -> tuple[ModuleSpec, CodeType]:
    """The module's spec and code; of a package those of its `__main__`."""
    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module += ".__main__"
            spec = find_spec(module)
    except ModuleNotFoundError as error:
        # Of the packages on the way: anything else that is missing is an error of the user's code.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # a module in sys.modules that never had a spec
        spec = None
    code = getattr(spec.loader, "get_code", lambda name: None)(module) if spec else None
    if spec is None or code is None:
        raise BadConfig(f"there is no module {module} to run", hint="Modules are sought from here.")
    return spec, code


def as_the_script_sees_it(error: BaseException, script: str) -> BaseException:
    """The error without the frames that led to the script: its traceback begins in the script."""
    path = str(Path(script).absolute())
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.with_traceback(None)  # it never ran
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
