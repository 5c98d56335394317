"""A bound is told beside the figures of the rows it holds for."""

from __future__ import annotations

from flodl_shm.bench.gates import Gate, verdicts

ROWS = [
    {"rig": "a", "policy": "sync", "he": 0.4},
    {"rig": "a", "policy": "cadence", "he": 0.95, "windows": 5},
]


def test_a_verdict_names_row_figure_and_bound():
    gates = [
        Gate("he", 0.9, lambda row: row["policy"] == "cadence"),
        Gate("windows", 4, lambda row: True, at_least=False),
    ]
    assert verdicts(gates, ROWS, ("rig", "policy", "other")) == [
        "a cadence: he 0.95, at least 0.9: held",
        "a cadence: windows 5, at most 4: MISSED",
    ]


def test_a_bound_itself_is_within():
    assert Gate("he", 0.9, lambda row: True).holds(0.9)
    assert Gate("he", 0.9, lambda row: True, at_least=False).holds(0.9)
