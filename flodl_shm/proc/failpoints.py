"""Named places where a test may kill, stop, fail or delay a process of a real run.

For tests only. Nothing can be switched on by accident: the environment must hold what to do, a
directory, and the very secret that lies in that directory in a file of the caller's own; with
only a part of it a run is refused. It is no option and no message: nothing of it travels, and no
config file can say it. Unset it costs a look at a module's flag, and nothing inside a reduce.

    FLODL_FAILPOINTS        mid_batch:rank=1:nth=3:do=kill;save.fsync:rank=0:do=enospc
    FLODL_FAILPOINTS_DIR    holds `token`; every injection adds a line to `hits` there first
    FLODL_FAILPOINTS_TOKEN  what the file `token` says

An injection fires in every process it fits (`rank=N`, `rank=launcher`; without: all of them) at
the nth time (1) that the place is passed, and `times` times (1; 0: always) in each rank, a
rank's later incarnations included. `do`: kill, stop, raise, enospc, delay=SECONDS, exit=CODE.
"""

from __future__ import annotations

import errno
import hmac
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.ids import Rank

SPEC: Final = "FLODL_FAILPOINTS"
DIRECTORY: Final = "FLODL_FAILPOINTS_DIR"
TOKEN: Final = "FLODL_FAILPOINTS_TOKEN"
SHORTEST_TOKEN: Final = 16
LAUNCHER: Final = "launcher"
PLACES: Final = (
    "start",  # the process is a rank, and has reported nothing
    "attach",  # the arena is mapped
    "mid_batch",  # a batch is fetched and not trained
    "before_publish",
    "at_publish",  # half of an arrival is written
    "after_publish",  # the arrival stands, nobody is woken
    "mid_shard",  # a block's mean is computed, and not marked valid
    "redo_valid",  # it is, and copied nowhere
    "after_shard",  # the rank's shard is closed
    "adopt",  # the consensus comes in, others' shards may be open
    "callback",  # inside of what bounds and contains a user's function
    "exit",  # the script has ended, the process has not
    "save.write",
    "save.fsync",
    "save.rename",  # of a file that was written
    "save.manifest",
    "save.publish",  # the folder is complete and does not bear its name
)
# Points of a reduce (train/reduce.py, train/shard.py) and what they are called here.
IN_A_REDUCE: Final = {
    "before arrive": "before_publish",
    "half arrived": "at_publish",
    "arrived": "after_publish",
    "computed": "mid_shard",
    "valid": "redo_valid",
    "closed": "after_shard",
    "leaving": "adopt",
}
ACTIONS: Final = ("kill", "stop", "raise", "enospc", "delay", "exit")

ARMED = False  # whether `hit` can do anything: ask before calling it


class Injected(Exception):
    """What `do=raise` raises."""


@dataclass(slots=True)
class _Injection:
    text: str  # as it was given: what a line in `hits` begins with
    place: str
    who: str  # "" for everybody
    nth: int
    times: int
    do: str
    value: float
    passed: int = 0  # in this process


@dataclass(frozen=True, slots=True)
class _Armed:
    who: str
    directory: Path
    injections: tuple[_Injection, ...]


_armed: _Armed | None = None


def arm(environ: Mapping[str, str], *, rank: Rank | None) -> None:
    """Take what the environment says for this process; `rank` None: the launcher.

    Raises BadConfig for a spec without its token, and for one that cannot be read.
    """
    global ARMED, _armed
    disarm()
    if SPEC not in environ:
        return
    directory = _checked(environ)
    injections = tuple(_parse(part) for part in environ[SPEC].split(";") if part.strip())
    _armed = _Armed(LAUNCHER if rank is None else str(rank), directory, injections)
    ARMED = True


def disarm() -> None:
    """Forget all of it."""
    global ARMED, _armed
    ARMED, _armed = False, None


def hit(place: str) -> None:
    """The place is passed: do what is to be done here, if anything."""
    if _armed is None:
        return
    for injection in _armed.injections:
        if injection.place == place and injection.who in ("", _armed.who):
            injection.passed += 1
            if injection.passed >= injection.nth and _may_fire(injection, _armed):
                _note(injection, _armed)
                _act(injection)


def hit_in_reduce(point: str, *_: object) -> None:
    """A reducer's hook: the same for the points of its protocol."""
    place = IN_A_REDUCE.get(point)
    if place is not None:
        hit(place)


# ---- what was asked for ------------------------------------------------------------------------


def _checked(environ: Mapping[str, str]) -> Path:
    """The directory, if the token is the one that lies in it."""
    given, directory = environ.get(TOKEN, ""), Path(environ.get(DIRECTORY, ""))
    try:
        file = directory / "token"
        wanted = file.read_text(encoding="utf-8").strip() if environ.get(DIRECTORY) else ""
        is_ours = bool(wanted) and file.stat().st_uid == os.geteuid()
    except (OSError, ValueError):
        wanted, is_ours = "", False
    if not is_ours or len(wanted) < SHORTEST_TOKEN:
        fault = f"{DIRECTORY} names no directory with a token of ours"
    elif not hmac.compare_digest(given.encode(), wanted.encode()):
        fault = f"{TOKEN} is not the token in {directory}"
    else:
        return directory
    raise BadConfig(
        f"{SPEC} is set, which breaks runs on purpose, but {fault}",
        hint=f"Unset {SPEC}: it is for this project's own tests.",
    )


def _parse(part: str) -> _Injection:
    """One of the injections of a spec. Raises BadConfig on one that cannot be."""
    place, *words = part.strip().split(":")
    told = dict(word.partition("=")[::2] for word in words)
    do, _, value = told.pop("do", "").partition("=")
    try:
        injection = _Injection(
            text=part.strip(),
            place=place,
            who=told.pop("rank", ""),
            nth=int(told.pop("nth", "1")),
            times=int(told.pop("times", "1")),
            do=do,
            value=float(value or 0),
        )
        is_known = place in PLACES and do in ACTIONS and not told
        if is_known and bool(value) == (do in ("delay", "exit")) and injection.nth >= 1:
            return injection
    except ValueError:
        pass
    raise BadConfig(
        f"{SPEC}: {part.strip()!r} is no injection",
        hint=f"As PLACE:rank=N:nth=N:do=ACTION; places: {', '.join(PLACES)}; "
        f"actions: {', '.join(ACTIONS)}.",
    )


# ---- doing it ----------------------------------------------------------------------------------


def _may_fire(injection: _Injection, armed: _Armed) -> bool:
    """Incarnations of a rank follow one another, so its lines are all there."""
    if injection.times == 0:
        return True
    start = f"{injection.text} in {armed.who} "
    try:
        lines = (armed.directory / "hits").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    return sum(line.startswith(start) for line in lines) < injection.times


def _note(injection: _Injection, armed: _Armed) -> None:
    """One write to a file opened for appending: lines of several processes stay whole."""
    line = f"{injection.text} in {armed.who} pid {os.getpid()}\n".encode()
    fd = os.open(
        armed.directory / "hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def _act(injection: _Injection) -> None:
    match injection.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)  # it is on its way
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise Injected(f"injected at {injection.place}")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "delay":
            time.sleep(injection.value)
        case "exit":
            os._exit(int(injection.value))
