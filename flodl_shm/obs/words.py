"""Figures as people read them. Pure: values in, short text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def number(value: float | None) -> str:
    """Four significant digits, no exponent for everyday sizes; a dash for what is not known."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def rate(value: float | None) -> str:
    """Something per second: whole from 100 on, three digits below."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def fraction(part: float | None) -> str:
    """A part of 1 with two digits, as `he` is shown."""
    return "-" if part is None else f"{part:.2f}"


def percent(part: float) -> str:
    """A fraction as whole percent."""
    return f"{100 * part:.0f}%"


def duration(seconds: float) -> str:
    """ "8.1 s", "12m40s" or "3h05m"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def ratio(counts: Sequence[int]) -> str:
    """Counts as multiples of the smallest one that is not 0: "2.5 : 1"."""
    smallest = min((count for count in counts if count), default=0)
    if not smallest:
        return " : ".join("0" for _ in counts)
    return " : ".join(f"{count / smallest:.2f}".rstrip("0").rstrip(".") for count in counts)


def clip(text: str, limit: int = 200) -> str:
    """The first line of a text, cut to `limit` characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= limit else line[: limit - 3] + "..."
