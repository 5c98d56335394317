"""DDP on paced ranks: what the ranks note down is measured by the definition of our own runs."""

from __future__ import annotations

import pytest

from flodl_shm.bench import rig_ddp
from flodl_shm.bench.rig_cases import Effort, Rig, config_of, slowed_s
from flodl_shm.bench.rig_ddp import RankLog, records_of, run_ddp
from flodl_shm.bench.rig_figures import measure
from flodl_shm.control.messages import Committed
from flodl_shm.ids import Rank

S = 1_000_000_000
# Two ranks, each step over when the slower one has ended it: at 1.2, 1.4, 1.6 and 1.8 s.
LOGS = [
    RankLog(10.0, S, tuple(round(at * S) for at in (1.2, 1.39, 1.6, 1.8))),
    RankLog(5.0, round(0.9 * S), tuple(round(at * S) for at in (1.15, 1.4, 1.59, 1.7))),
]


def test_every_step_is_a_window_and_the_first_one_is_not_counted():
    told = measure(records_of(LOGS, steps_per_epoch=2), lambda rank, epoch: 0.0)
    assert (told.windows, told.picks) == (3, 6)
    assert told.picks_per_s == pytest.approx(10.0)
    assert told.he == pytest.approx(10 / 15)
    assert told.he_whole == pytest.approx(10 / 15)
    assert told.sync_bound == pytest.approx(10 / 15)


def test_steps_have_their_epochs():
    records = records_of(LOGS, steps_per_epoch=2)
    commits = [r.message for r in records if isinstance(r.message, Committed)]
    assert [commit.epoch for commit in commits] == [0, 0, 1, 1]


def test_what_a_rank_trains_is_no_other_ranks():
    class Loop:
        def __init__(self):
            self.asked = []

        def step(self, pick, step_index, epoch):
            self.asked.append((pick, step_index, epoch))
            return len(self.asked)

    config = config_of(TINY, "ddp", EFFORT, seed=3, root=None)
    per_epoch = rig_ddp._steps_per_epoch(config)
    loops = [Loop(), Loop()]
    for rank, loop in enumerate(loops):
        log = rig_ddp._train(loop, config, rank, 7.0)
        assert len(log.ends) == rig_ddp._steps(config)
    first = {pick for loop in loops for pick, _, epoch in loop.asked if epoch == 0}
    assert first == set(range(2 * per_epoch))
    assert [index for _, index, _ in loops[0].asked] == list(range(rig_ddp._steps(config)))


TINY = Rig("tiny", (2.0, 4.0), quick_s=0.6, full_s=1.0, epoch_s=0.1, throttle=(Rank(0), 2.0))
EFFORT = Effort(quick=True, repeats=1, free_run_s=0.05)


@pytest.mark.slow  # what DDP imports
@pytest.mark.procs
def test_real_ranks_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(rig_ddp.tempfile, "tempdir", str(tmp_path))
    config = config_of(TINY, "ddp", EFFORT, seed=3, root=tmp_path)
    told = measure(run_ddp(config), lambda rank, epoch: slowed_s(config, rank, epoch), changed_at=1)
    # Only that they are of this world: a shared machine may make anything late.
    assert 0 < told.he < 2
    assert told.rates[0] > told.rates[1] > 0
    assert told.windows == rig_ddp._steps(config) - 1
    assert told.windows_to_recover >= 1
    assert not list(tmp_path.glob("bench-ddp-*")), "what the ranks wrote is gone"
