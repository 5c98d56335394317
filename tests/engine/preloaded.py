"""Run by the tests: a process with everything imported, which runs commands one after the other.

Each command gets a child that lives through the very same code as `python -m flodl_shm.run`, but
for the second that importing torch takes. A line of JSON in: arguments, directory, environment,
files for stdout and stderr. Two lines out: the child's pid; its exit code and what it left.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

from flodl_shm.cli.main import main_run
from flodl_shm.engine.rank_main import preload
from flodl_shm.proc.prctl import adopt_orphans
from flodl_shm.proc.procfs import children_of

AFTERWARDS_S = 2.0  # nothing of a run may be there this long after its end


def be_the_launcher(order: dict) -> None:
    """As a fresh interpreter in that directory would be. Does not return."""
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for fd, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    sys.path[0] = order["cwd"]
    sys.argv = ["flodl_shm.run", *order["words"]]
    sys.exit(main_run(order["words"]))


def left_behind() -> list[int]:
    """Processes of the run that outlive it: orphans come to this one."""
    deadline = time.monotonic() + AFTERWARDS_S
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() >= deadline:
            return list(children_of(os.getpid()))
        time.sleep(0.01)


def main() -> None:
    preload()
    adopt_orphans()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            be_the_launcher(order)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "left": left_behind()}), flush=True)


if __name__ == "__main__":
    main()
