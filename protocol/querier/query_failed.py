"""Why a querier has no answer: the stage, and the helpers it failed at."""

from __future__ import annotations

from http import HTTPStatus

from protocol.errors import TrefoilError
from protocol.status import Shortfall
from protocol.text import printable

_LATER = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
# Another key, set or option is taken by the same helpers, or their operators let this one in.
_TO_MEND = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY})


class QueryFailed(TrefoilError):
    """The query has no answer. Names the stage, and the helpers it failed at (0, 1, 2).

    `http_status` is 0 where a helper did not answer at all. `taken` says whether some helper may have the query now.
    `out_of_reach` says that there was no connection, or that it was closed: a moment later there may be one.
    `said` is what a helper answered in words, if it did.
    `details` are further lines for whoever wants to know more, and `shortfall` is what they say where reports lacked.
    What a helper says is shown only as far as it is printable.
    """

    def __init__(
        self,
        stage: str,
        helpers: tuple[int, ...],
        message: str,
        hint: str = "",
        *,
        http_status: int = 0,
        taken: bool = True,
        out_of_reach: bool = False,
        said: str = "",
        details: tuple[str, ...] = (),
        shortfall: Shortfall | None = None,
    ) -> None:
        super().__init__(printable(message), printable(hint))
        self.stage = stage
        self.helpers = helpers
        self.http_status = http_status
        self.taken = taken
        self.out_of_reach = out_of_reach
        self.said = printable(said)
        self.shortfall = shortfall
        self.details = tuple(printable(line) for line in details)
        self.again = self._again()

    def _again(self) -> bool | None:
        """Reports that were counted before stay counted; a helper that was out of reach or busy may be back."""
        if self.shortfall is not None:
            return False
        if self.http_status in _TO_MEND:
            return None
        return not self.refused or self.http_status in _LATER

    @property
    def refused(self) -> bool:
        """Whether the helper has understood what was asked and will not do it, rather than being out of reach."""
        return HTTPStatus.BAD_REQUEST <= self.http_status < HTTPStatus.INTERNAL_SERVER_ERROR
