from __future__ import annotations

import pytest

from flodl_shm.obs.words import clip, duration, fraction, number, percent, rate, ratio


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (number(None), "-"),
        (number(0.98765), "0.9877"),
        (number(1912.4), "1912"),
        (rate(None), "-"),
        (rate(988.06), "988"),
        (rate(24.034), "24"),
        (rate(0.12345), "0.123"),
        (fraction(None), "-"),
        (fraction(0.9659), "0.97"),
        (percent(0.375), "38%"),
        (duration(8.12), "8.1 s"),
        (duration(760), "12m40s"),
        (duration(11_100), "3h05m"),
        (ratio([25, 10]), "2.5 : 1"),
        (ratio([10, 0, 20]), "1 : 0 : 2"),
        (ratio([0, 0]), "0 : 0"),
        (clip("first\nsecond"), "first"),
        (clip("x" * 300), "x" * 197 + "..."),
    ],
)
def test_words(made, expected):
    assert made == expected
