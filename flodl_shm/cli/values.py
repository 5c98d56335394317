"""From the words of the command line to values. Each raises BadConfig with the word in it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from flodl_shm.cli.options import not_here
from flodl_shm.engine.config import Slow
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOW = re.compile(r"(\d+):([^@:]+)(?:@(\d+))?")


def parse_slow(words: Iterable[str]) -> tuple[Slow, ...]:
    """RANK:FACTOR or RANK:FACTOR@EPOCH, each."""
    return tuple(_one_slow(word) for word in words)


def parse_milliseconds(word: str) -> tuple[float, ...]:
    """20,40,80 -> (20.0, 40.0, 80.0)."""
    try:
        return tuple(float(part) for part in word.split(","))
    except ValueError:
        raise BadConfig(
            f"--step-ms {word!r} is no list of milliseconds", hint="Write it as 20,40,80."
        ) from None


def parse_batch_size(word: str) -> int:
    """One number. A size per rank is understood, and refused."""
    if "," in word:
        raise not_here(f"--batch-size {word}, one size per rank,", "Give one number.")
    return parse_whole(word, "--batch-size")


def parse_whole(word: str, flag: str) -> int:
    """A whole number."""
    try:
        return int(word)
    except ValueError:
        raise BadConfig(f"{flag} {word!r} is no whole number") from None


def _one_slow(word: str) -> Slow:
    match = SLOW.fullmatch(word.strip())
    factor = _float(match[2]) if match else math.nan
    if match is None or math.isnan(factor):
        raise BadConfig(
            f"--slow {word!r} is not RANK:FACTOR or RANK:FACTOR@EPOCH",
            hint="1:2.5 makes rank 1 take 2.5 times as long.",
        )
    return Slow(Rank(int(match[1])), factor, int(match[3] or 0))


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
