"""Workloads are found by name, without torch; each one is a complete set of arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flodl_shm import Trainer, workloads
from flodl_shm.errors import BadConfig


def test_names_come_without_torch():
    code = (
        "import sys; from flodl_shm import workloads as w; w.check(w.DEFAULT);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_each_is_accepted_by_trainer_and_has_an_evaluation(name):
    job = Trainer(**workloads.build(name)).job
    assert workloads.describe(name)
    assert job.eval_fn is not None
    assert job.wishes.epochs is not None
    assert job.wishes.batch_size is not None


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(BadConfig, match="no workload 'resnet'") as caught:
        workloads.build("resnet")
    assert "char-gpt" in caught.value.hint


@pytest.mark.parametrize("name", workloads.NAMES)
def test_an_unknown_option_is_refused(name):
    with pytest.raises(BadConfig, match=f"{name} has no option 'depth'"):
        workloads.build(name, depth=3)
