"""Runs a user's script as `python script.py args` does, inside a rank that exists already.

Not by way of runpy: it takes its `__main__` away again when the script ends, while threads and
exit handlers of the script still run, and its frames would stand in every traceback.
"""

from __future__ import annotations

import builtins
import io
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_script(script: str, arguments: Sequence[str]) -> None:
    """argv, sys.path[0] and `__main__` as a fresh interpreter has them; `script` as it was given.

    Raises whatever the script raises, SystemExit too.
    """
    path = Path(script).absolute()  # of `__file__` and of tracebacks, as the interpreter has it
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:  # under -P the first entry is the standard library's
        sys.path[0] = str(path.resolve().parent)
    main = ModuleType("__main__")
    facts: dict[str, Any] = main.__dict__
    facts |= {
        "__file__": str(path),
        "__cached__": None,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", str(path)),
    }
    sys.modules["__main__"] = main  # before the code runs: pickle looks classes up here
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, facts)


def as_the_script_sees_it(error: BaseException, script: str) -> BaseException:
    """The error without the frames that led to the script: its traceback begins in the script."""
    path = str(Path(script).absolute())
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.with_traceback(None)  # it never ran
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
