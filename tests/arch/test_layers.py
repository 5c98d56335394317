"""The house as DESIGN draws it: imports point down, and pure rooms reach for nothing outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flodl_shm", "flodl_net")

# Rooms and modules by height. Equal heights may not import each other, but for the same room.
HEIGHTS = {
    "flodl_shm.errors": 0,
    "flodl_shm.ids": 0,
    "flodl_shm": 1,  # the package itself: names, lazily; what it is lazy about is not its import
    "flodl_shm.control": 2,
    "flodl_shm.wire": 3,
    "flodl_shm.sim": 3,
    "flodl_shm.shm": 4,
    "flodl_shm.proc": 4,
    "flodl_shm.gpu": 4,
    "flodl_shm.obs": 4,
    "flodl_shm.train": 5,
    "flodl_shm.engine": 6,
    "flodl_shm.workloads": 7,
    "flodl_shm.bench": 8,
    "flodl_shm.cli": 9,
    "flodl_shm.__main__": 10,
    "flodl_shm.run": 10,
}
# Against the order, and why.
ALLOWED = {
    # A rank runs a workload by its name; a workload knows nothing of the engine that runs it.
    ("flodl_shm.engine", "flodl_shm.workloads"),
    # Under plain python Trainer asks the command line's room what the environment says.
    ("flodl_shm.train", "flodl_shm.cli"),
}
PURE_ROOMS = ("flodl_shm/control", "flodl_shm/wire", "flodl_net/control")
OUTSIDE = {
    "asyncio", "ctypes", "datetime", "fcntl", "io", "logging", "mmap", "multiprocessing", "numpy",
    "os", "pathlib", "posix_ipc", "psutil", "pynvml", "queue", "random", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading",
    "time", "torch", "uuid",
}  # fmt: skip
NET_MAY_USE = {"wire", "control", "errors", "proc", "engine"}
NET_SHM_BRIDGE = "flodl_net/io/bridge.py"


def sources(*folders):
    return [
        path.relative_to(ROOT)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def module_of(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree, module):
    """Every module named by an import anywhere in the file, lazy ones too, but for typing."""
    typing_only = {
        node
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.dump(guard.test)
        for statement in guard.body
        for node in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports by a relative name"
            # `from package import module` names a module; `from module import name` does not.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(name):
    """The longest known prefix of a dotted name: flodl_shm.control.plan -> flodl_shm.control."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        room = ".".join(parts[:length])
        if room in HEIGHTS:
            return room
    return None


@pytest.mark.parametrize("path", sources("flodl_shm"), ids=str)
def test_imports_point_down(path):
    module = module_of(path)
    home = room_of(module)
    for name in imports(ast.parse((ROOT / path).read_text()), module):
        assert not name.startswith("flodl_net"), f"{path} imports {name}"
        there = room_of(name)
        if there is None or there == home or (home, there) in ALLOWED:
            continue
        assert HEIGHTS[there] < HEIGHTS[home], f"{path} imports {name}, which is not below it"


@pytest.mark.parametrize("path", sources("flodl_net"), ids=str)
def test_flodl_net_uses_only_its_part_of_flodl_shm(path):
    for name in imports(ast.parse((ROOT / path).read_text()), str(path)):
        if name.startswith("flodl_shm."):
            room = name.split(".")[1]
            allowed = NET_MAY_USE | ({"shm"} if str(path) == NET_SHM_BRIDGE else set())
            assert room in allowed, f"{path} imports {name}"


@pytest.mark.parametrize("path", sources(*PURE_ROOMS), ids=str)
def test_pure_rooms_reach_for_nothing_outside(path):
    names = imports(ast.parse((ROOT / path).read_text()), str(path))
    reached = sorted({name.split(".")[0] for name in names} & OUTSIDE)
    assert not reached, f"{path} reaches outside: {reached}"


def calls_of(tree):
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


@pytest.mark.parametrize("path", sources(*PURE_ROOMS), ids=str)
def test_pure_rooms_open_and_print_nothing(path):
    called = calls_of(ast.parse((ROOT / path).read_text()))
    assert not called & {"open", "print", "input", "eval", "exec", "__import__"}


ENVIRONMENT_READERS = {
    "flodl_shm/cli/run.py",  # the one place where configuration enters
    "flodl_shm/proc/fork_loop.py",  # no setting: it puts back a variable it changed for a moment
    "flodl_shm/bench/faults_script.py",  # it is a user's script, which may ask for its rank
    "flodl_shm/cli/plain_python.py",  # `python train.py`: no command line was there to read it
}


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=str)
def test_the_environment_is_read_in_one_place(path):
    reads = [
        node.lineno
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "get" and _is_environ(node.value))
        or (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and _is_environ(node.value)
        )
        or (isinstance(node, ast.Attribute) and node.attr == "getenv")
    ]
    if str(path) not in ENVIRONMENT_READERS:
        assert not reads, f"{path} reads the environment in lines {reads}"


def _is_environ(node):
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def test_no_pickle_between_processes():
    users = [
        str(path)
        for path in sources(*PACKAGES)
        if {name.split(".")[0] for name in imports(ast.parse((ROOT / path).read_text()), "")}
        & {"pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill"}
    ]
    # bench measures against a pickled queue, to show the difference
    assert not [path for path in users if not path.startswith("flodl_shm/bench/")]


def test_the_walk_sees_what_it_should():
    """A rule that cannot fail is no rule."""
    lazy = "def f():\n    from time import sleep\n"
    tree = ast.parse("import os\nif TYPE_CHECKING:\n    import typing_only\n" + lazy)
    assert imports(tree, "x") == {"os", "time.sleep"}
    assert room_of("flodl_shm.control.plan.merge") == "flodl_shm.control"
    assert room_of("flodl_shm.errors.BadConfig") == "flodl_shm.errors"
    assert room_of("flodl_shm.Trainer") == "flodl_shm"
    assert room_of("numpy") is None
