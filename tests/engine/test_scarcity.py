"""What the system has no more of is this machine's lack; any other error stays what it is."""

from __future__ import annotations

import errno
import os

import pytest

from flodl_shm.engine.scarcity import WAYS_OUT, scarcity_told
from flodl_shm.errors import HostUnfit


@pytest.mark.parametrize("number", WAYS_OUT)
def test_a_lack_is_named_with_the_way_out(number):
    with pytest.raises(HostUnfit) as raised, scarcity_told():
        raise OSError(number, os.strerror(number), "a/file")
    assert str(raised.value) == f"{os.strerror(number)}: a/file. {WAYS_OUT[number]}"


@pytest.mark.parametrize("error", [OSError("odd"), OSError(errno.EPIPE, "gone"), KeyError("x")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as raised, scarcity_told():
        raise error
    assert raised.value is error
