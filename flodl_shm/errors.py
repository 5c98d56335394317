"""Every error the project raises on purpose, with the exit code the launcher ends with.

An error says what happened, with values; its `hint` says what to do next. Nothing here knows
where the error is shown.
"""

from __future__ import annotations


class FlodlError(Exception):
    """Base of every error raised on purpose. `hint` says what to do next."""

    exit_code = 70  # EX_SOFTWARE: unless a subclass says otherwise, our bug

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        """What happened, then what to do: wherever it is shown, both are."""
        return f"{self.what}. {self.hint}" if self.hint else self.what

    def sentence(self) -> str:
        """One line for the screen."""
        return str(self)


class BadConfig(FlodlError):
    """The user asked for something that cannot hold."""

    exit_code = 2


class HostUnfit(FlodlError):
    """This machine lacks something the run needs: memory, a device, a writable directory."""

    exit_code = 3


class RankFailed(FlodlError):
    """User code raised in a rank."""

    exit_code = 1


class PeersLost(FlodlError):
    """Peers, quorum or the launcher are gone, so the run cannot go on."""

    exit_code = 4


class LinkLost(PeersLost):
    """A rank cannot talk with its launcher any more: it is lost, the others go on."""


def of_exit_code(code: int, what: str) -> FlodlError:
    """The error of a run that ended so, for whoever has to raise it."""
    kinds = {kind.exit_code: kind for kind in (BadConfig, HostUnfit, PeersLost, RankFailed)}
    return kinds.get(code, WeBroke)(what)


class PeerBroke(FlodlError):
    """The other side violated the protocol."""


class WeBroke(FlodlError):
    """A state that no input can cause: our bug."""
