"""What a rank weighs in the mean."""

from __future__ import annotations

import pytest

from flodl_shm.control.mass import mass


@pytest.mark.parametrize(
    ("steps", "gamma", "want"),
    [(0, 0.0, 0.0), (0, -1.0, 0.0), (5, 1.0, 5.0), (5, 0.0, 1.0), (4, -1.0, 0.25)],
)
def test_an_idle_rank_weighs_nothing_whatever_gamma(steps: int, gamma: float, want: float) -> None:
    assert mass(steps, gamma) == want
