"""How an agreement can fail. Each error names the helper that is in the way, where it is one."""

from __future__ import annotations

from protocol.errors import Blamed
from protocol.status import Shortfall


class AgreementError(Blamed):
    """The helpers did not come to an attempt."""


class AlreadyReleased(AgreementError):
    """The query has its answer: serve the stored share (`Agreement.answer`), never attempt it again."""


class TooFewReports(AgreementError):
    """The three helpers agree that too few reports are acceptable: asking again will not help."""

    def __init__(self, shortfall: Shortfall, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.shortfall = shortfall


class DrawnTooOften(AgreementError):
    """Reports were in as many draws of such noise as there may be: no other attempt at it is made with them."""


class Disputed(AgreementError):
    """A helper voted both ways: the reports stay locked, and its own signatures prove who lied."""

    def __init__(self, party: int) -> None:
        super().__init__(
            f"helper {party + 1} voted both YES and NO on the same attempt",
            "Take its two signatures to its operator.",
            party=party,
        )
