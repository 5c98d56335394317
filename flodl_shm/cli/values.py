"""From the words of the command line to values. Each raises BadConfig with the word in it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

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
    return _floats(word, "--step-ms", "milliseconds", "20,40,80")


def parse_ratios(word: str) -> tuple[float, ...]:
    """0.7,0.3 -> (0.7, 0.3)."""
    return _floats(word, "--partition-ratios", "shares", "0.7,0.3")


def parse_batch_size(word: str) -> int | tuple[int, ...]:
    """64 -> 64, and 64,32 -> (64, 32)."""
    sizes = tuple(parse_whole(part, "--batch-size") for part in word.split(","))
    return sizes if len(sizes) > 1 else sizes[0]


def parse_speed_hint(word: str) -> tuple[Rank, float]:
    """1:2.5 -> rank 1 is the slowest, the others are 2.5 times as fast."""
    rank, _, times = word.partition(":")
    if not rank.strip().isdecimal() or math.isnan(_float(times)):
        raise BadConfig(
            f"--speed-hint {word!r} is not RANK:TIMES",
            hint="1:2.5 says that rank 1 is the slowest and the others are 2.5 times as fast.",
        )
    return Rank(int(rank)), _float(times)


def parse_max_failures(word: str | None) -> int | float | None:
    """2 -> 2 ranks, 0.5 -> half of them."""
    if word is None:
        return None
    word = word.strip()
    if word.lstrip("+-").isdecimal():
        return int(word)
    if math.isnan(_float(word)):
        raise BadConfig(
            f"--max-failures {word!r} is neither a number of ranks nor a part of them",
            hint="2 lets two ranks be missing, 0.5 half of them.",
        )
    return _float(word)


def parse_whole(word: str, flag: str, hint: str = "") -> int:
    """A whole number."""
    try:
        return int(word)
    except ValueError:
        raise BadConfig(f"{flag} {word!r} is no whole number", hint=hint) from None


def _one_slow(word: str) -> Slow:
    match = SLOW.fullmatch(word.strip())
    factor = _float(match[2]) if match else math.nan
    if match is None or math.isnan(factor):
        raise BadConfig(
            f"--slow {word!r} is not RANK:FACTOR or RANK:FACTOR@EPOCH",
            hint="1:2.5 makes rank 1 take 2.5 times as long.",
        )
    return Slow(Rank(int(match[1])), factor, int(match[3] or 0))


def _floats(word: str, flag: str, what: str, example: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in word.split(","))
    except ValueError:
        raise BadConfig(
            f"{flag} {word!r} is no list of {what}", hint=f"Write it as {example}."
        ) from None


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
