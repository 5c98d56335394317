"""Whether the ranks of a run have all come, and whether they built the same thing.

Collects Ready and Attached reports of the living. A rank that dies before it is ready is simply
not waited for. Nothing here knows what a layout digest is made of, only that all must be equal.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from flodl_shm.errors import BadConfig, WeBroke

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flodl_shm.control.messages import Attached, Finished, Ready
    from flodl_shm.control.options import Wishes
    from flodl_shm.ids import Rank


class Formation:
    """Reports of one start."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ready: dict[Rank, Ready] = {}
        self._attached: set[Rank] = set()

    def check_came(self, causes: Iterable[str]) -> None:
        """All are dead, of `causes`. Raises BadConfig if all have ended well without a word."""
        if not self._ready and set(causes) == {"exit 0"}:
            raise BadConfig(
                "every rank ended without training", hint="The script must call Trainer(...).run()."
            )

    def ready(self, report: Ready) -> None:
        """Write down that a rank has built its model."""
        self._ready[report.rank] = report

    def attached(self, report: Attached) -> None:
        """Write down that a rank is bound to the arena."""
        self._attached.add(report.rank)

    def agreed(self, living: Collection[Rank]) -> list[Ready] | None:
        """The living ranks' reports in rank order, or None while one is missing.

        Raises BadConfig, naming the first difference, if two ranks built different things.
        """
        if any(rank not in self._ready for rank in living):
            return None
        reports = [self._ready[rank] for rank in sorted(living)]
        for other in reports[1:]:
            difference = _difference(reports[0], other)
            if difference:
                raise BadConfig(
                    f"ranks {reports[0].rank} and {other.rank} differ: {difference}",
                    hint="Every rank must build the same model on the same data; "
                    "look for code that depends on the rank or on an unseeded random choice.",
                )
        return reports

    def difference(self, report: Ready) -> str:
        """What a rank that comes late built otherwise than the others, in words; or nothing."""
        first = min(self._ready)
        return _difference(self._ready[first], report)

    def all_attached(self, living: Collection[Rank]) -> bool:
        """True when no living rank is still binding its replica."""
        return all(rank in self._attached for rank in living)


def check_same(reports: Iterable[Finished]) -> None:
    """Raise WeBroke, naming who has what, unless all ended with the same parameters."""
    by_rank = {report.rank: report.params_sha256[:12] for report in reports}
    if len(set(by_rank.values())) > 1:
        raise WeBroke(f"ranks end with different parameters: {by_rank}")


def _difference(one: Ready, other: Ready) -> str:
    """The first difference in words; empty if there is none."""
    if one.digest != other.digest:
        for mine, theirs in zip_longest(one.names, other.names, fillvalue="nothing"):
            if mine != theirs:
                return f"the model has {mine} on one, {theirs} on the other"
        return f"model layout {one.digest[:12]} on one, {other.digest[:12]} on the other"
    if one.samples != other.samples:
        return f"the dataset has {one.samples} samples on one, {other.samples} on the other"
    if one.wishes != other.wishes:
        mine, theirs = _apart(one.wishes, other.wishes)
        return f"Trainer was called with {mine} on one, {theirs} on the other"
    if one.callbacks != other.callbacks:
        mine, theirs = (", ".join(those.callbacks) or "no" for those in (one, other))
        return f"Trainer was given {mine} functions on one, {theirs} on the other"
    return ""


def _apart(one: Wishes, other: Wishes) -> tuple[str, str]:
    """What each has that the other has not: "epochs=4", "epochs=9"."""
    names = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    mine, theirs = (
        ", ".join(f"{name}={getattr(those, name)!r}" for name in names) for those in (one, other)
    )
    return mine, theirs
