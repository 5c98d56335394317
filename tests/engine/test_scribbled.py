"""Something writes over the control memory of a rank: that rank is lost and named, no other is."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flodl_shm.engine.host import Host
from flodl_shm.errors import PeerBroke

pytestmark = pytest.mark.procs

# Rank 1 writes over its own rings in its 5th step, as a stray pointer of an extension would.
SCRIPT = """\
import time
from base import *
from flodl_shm.train import session

WHAT = sys.argv[1]
steps = 0

def scribble():
    link = session.CURRENT._session.link
    up, down = link._writer._ring, link._reader._ring
    if WHAT == "up-head":
        up.head.store(up.head.load() + (1 << 40))
        link._writer._bell()
        time.sleep(0.2)  # its next report would put it right
    if WHAT == "up-frame":  # behind the head: what is published next begins with it
        up.head.store(up.head.load() + 64)
        link._writer._bell()
        time.sleep(0.2)
    if WHAT == "up-body":
        link._writer.send(b"no message at all", deadline_ns=0)
    if WHAT == "up-tail":
        up.tail.store(1 << 50)
        link._writer._room_to = 0  # it looks at once, not in 64 KiB
    if WHAT == "down-tail":
        down.tail.store(1 << 50)
    if WHAT == "down-data":
        down.data[:] = bytes(255 for _ in range(len(down.data)))
        down.head.store(down.head.load() + 64)

def step(model, batch):
    global steps
    steps += 1
    time.sleep(0.003)
    if RANK == 1 and steps == 5:
        scribble()
    return mse(model, batch)

train(train_step=step, dataset=data(96), policy="sync", seed=3)
"""

# what is written over -> what the death says
CASES = {
    "up-head": r"its rings are broken: rank 1 published \d+ bytes in a ring of",
    "up-frame": r"its rings are broken: rank 1 wrote no frame header at \d+",
    "up-body": r"its rings are broken: ",
    "up-tail": r"a report was lost: the launcher says it has read",
    "down-data": r"an order was lost: the launcher wrote no frame header",
}


@pytest.fixture(scope="module")
def ends(launches):
    files = {"train.py": SCRIPT}
    started = {
        what: launches.submit(
            what, "--ranks", "2", "--stall-timeout", "5", "train.py", what, files=files
        )
        for what in (*CASES, "down-tail")
    }
    return lambda what: started[what].result()


def check(end):
    assert end.code == 0, str(end)
    assert end.left == []
    assert [c["done_once"] for c in end.summary["coverage"]] == [96, 96], str(end)
    return end.summary["deaths"]


@pytest.mark.parametrize("what", CASES)
def test_the_rank_is_lost_with_the_reason_and_the_others_go_on(ends, what):
    (death,) = check(ends(what))
    assert death["rank"] == 1
    assert re.search(CASES[what], death["cause"]), death
    assert (ends(what).out + ends(what).err).count("rings are broken") <= 3


def test_a_readers_cursor_that_lies_does_not_end_the_launcher(ends):
    """The launcher looks at it only when the room it knew of is used up: it may never matter."""
    assert len(check(ends("down-tail"))) <= 1


def test_when_it_matters_the_rank_is_killed_once():
    host, killed = Host.__new__(Host), []
    host.faults = []
    host.supervisor = SimpleNamespace(kill=lambda rank, why: killed.append((rank, why)))

    def lie(body, *, deadline_ns):
        raise PeerBroke("rank 1 says it has read 9 bytes of the 8 written")

    member = SimpleNamespace(
        rank=1, backlog=[b"order"], gone=False, is_broken=False, writer=SimpleNamespace(send=lie)
    )
    for _ in range(3):
        host.flush(member)
    assert killed == [(1, "its rings are broken: rank 1 says it has read 9 bytes of the 8 written")]
    assert len(host.faults) == 1
    assert host._reports_of(member, 0) == []
