"""Why a query has no answer: the error, and the sentence that a person reads.

Three helpers report a failure independently. What they agree on is said once; where they differ, one of them is
malicious or mistaken, and each is quoted with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from protocol.errors import ErrorKind, Rejection, TrefoilError, printable
from protocol.shares import PARTIES
from protocol.status import Failure, QueryState, QueryStatus, Shortfall
from protocol.units import show

_RETRY_LATER = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
# The same helpers accept another key, set or option, or their operators register this one.
_CHANGE_FIRST = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY})


_KINDS = {
    QueryState.WITHDRAWN: ErrorKind.WITHDRAWN,
    QueryState.EXPIRED: ErrorKind.EXPIRED,
    QueryState.DISPUTED: ErrorKind.DISPUTED,
}


class QueryFailed(TrefoilError):
    """The query has no answer. `stage` and `helpers` (0, 1, 2) say where it failed.

    - `http_status`: 0 if there was no response
    - `taken`: whether some helper may have the query
    - `unreachable`: the connection failed; a retry may succeed
    - `reason`: the helper's own message, if it sent one
    - `details`: one line per helper, for `--details`
    - `shortfall`: the counts, if too few reports could be counted

    Text of a helper is made printable: it could hold escape sequences.
    """

    kind = ErrorKind.REFUSED

    def __init__(
        self,
        stage: str,
        helpers: tuple[int, ...],
        message: str,
        hint: str = "",
        *,
        http_status: int = 0,
        taken: bool = True,
        unreachable: bool = False,
        reason: str = "",
        details: tuple[str, ...] = (),
        shortfall: Shortfall | None = None,
        kind: ErrorKind | None = None,
    ) -> None:
        super().__init__(printable(message), printable(hint), kind=kind)
        self.stage = stage
        self.helpers = helpers
        self.http_status = http_status
        self.taken = taken
        self.unreachable = unreachable
        self.reason = printable(reason)
        self.shortfall = shortfall
        self.details = tuple(printable(line) for line in details)
        self.retryable = self._retryable()

    def _retryable(self) -> bool | None:
        """Return whether a retry can help: never after a shortfall, always if a helper was unreachable or busy."""
        if self.shortfall is not None:
            return False
        if self.http_status in _CHANGE_FIRST:
            return None
        return not self.refused or self.http_status in _RETRY_LATER

    @property
    def refused(self) -> bool:
        """Return whether the helper understood the request and refused it."""
        return HTTPStatus.BAD_REQUEST <= self.http_status < HTTPStatus.INTERNAL_SERVER_ERROR


def refusal(statuses: Mapping[int, QueryStatus], names: Sequence[str]) -> QueryFailed:
    """Return the error for a query that ended without an answer at some helpers."""
    failures = {party: status.failure for party, status in sorted(statuses.items()) if status.failure is not None}
    suspects: set[int | None] = set(_suspects(failures))
    first = next(iter(failures.values()))
    shortfall = _common_shortfall(failures)
    if shortfall is not None:
        message = f"Refused: {_why_too_few(shortfall, names)}. Nothing was spent."
        details = _shortfall_details(shortfall, names)
        suspects = {_only_rejecter(shortfall)}
    else:
        message, details = _sentence(statuses, failures, names), _details(failures, names)
    helpers = tuple(sorted(party for party in suspects if party is not None)) or tuple(failures)
    hint = first.hint if shortfall is None else _rest_hint(failures, names) or _hint(shortfall, first.hint)
    kind = _kind(shortfall, {statuses[party].state for party in failures})
    if kind is ErrorKind.ABORTED and "--new" not in hint:
        # Its deadline passes, and then the same command can only repeat this error.
        hint = f"{hint} Submit a new query with --new.".strip()
    return QueryFailed(first.stage.value, helpers, message, hint, details=details, shortfall=shortfall, kind=kind)


def _suspects(failures: Mapping[int, Failure]) -> list[int]:
    """Return the helpers of which one can be malicious, given whom each blames; none if nobody blames anybody.

    A helper's word is no evidence: that one blames another says that one of the two is malicious. It is identified if
    no other that has failed disagrees.
    """
    blamed = {party: failure.party for party, failure in failures.items() if failure.party is not None}
    accused = set(blamed.values())
    if len(accused) == 1 and set(failures) <= accused | set(blamed):
        return list(accused)
    consistent = [
        suspect
        for suspect in range(PARTIES)
        if blamed and all(other == suspect for party, other in blamed.items() if party != suspect)
    ]
    return consistent or sorted(accused)


def _kind(shortfall: Shortfall | None, states: set[QueryState]) -> ErrorKind:
    if shortfall is not None:
        return ErrorKind.ALREADY_COUNTED if _common_reason(shortfall) is Rejection.SEEN else ErrorKind.TOO_FEW
    for state, kind in _KINDS.items():
        if state in states:
            return kind
    return ErrorKind.ABORTED


def _common_shortfall(failures: Mapping[int, Failure]) -> Shortfall | None:
    """Return the shortfall that all failures report, or None if they differ."""
    first, *others = (failure.shortfall for failure in failures.values())
    return first if all(other == first for other in others) else None


def _common_reason(shortfall: Shortfall) -> Rejection | None:
    """Return the most frequent rejection if all three helpers report the same counts, else None."""
    first, second, third = shortfall.left_out
    return max(first, key=lambda reason: first[reason]) if first and first == second == third else None


def _why_too_few(shortfall: Shortfall, names: Sequence[str]) -> str:
    """Return one clause on too few reports: with the reason if all three agree, with a name if it is one helper."""
    submitted = _reports(shortfall.submitted)
    left = f"{shortfall.accepted} can be counted and {shortfall.needed} are needed"
    alone = _only_rejecter(shortfall)
    if alone is not None:
        return f"{names[alone]} alone leaves out {sum(shortfall.left_out[alone].values())} of {submitted}; {left}"
    reason = _common_reason(shortfall)
    if reason is None:
        return f"of {submitted} {left}"
    counts = shortfall.left_out[0]
    main, rest = counts[reason], sum(counts.values()) - counts[reason]
    also = f", and {rest} cannot be counted" if rest else ""
    return f"{_subject(reason, main, shortfall.submitted)}{also}" + (f"; {left}" if shortfall.accepted else "")


def _hint(shortfall: Shortfall, otherwise: str) -> str:
    """Return a hint for the common reason: more reports of the same kind would be rejected too."""
    match _common_reason(shortfall):
        case Rejection.SEEN:
            return "List the earlier answers with trefoil query list, or query reports that no answer has counted."
        case Rejection.WRONG_HELPER_SET:
            return "Give the helper set that the reports were sealed to with --helpers, and --new."
        case Rejection.NOISE_TOO_SMALL:
            return "Give a smaller --epsilon, or none, and --new."
        case _:
            return otherwise


def _rest_hint(failures: Mapping[int, Failure], names: Sequence[str]) -> str:
    """Return what can be asked for, and which helper affords least; empty unless reports have too little left."""
    little = {
        party: failure.affordable
        for party, failure in failures.items()
        if failure.shortfall is not None and Rejection.TOO_LITTLE_LEFT in failure.shortfall.left_out[party]
    }
    if not little:
        return ""
    party = min(little, key=lambda each: little[each] or 0)
    most = little[party]
    if most is None:
        return f"{names[party]} has too little left of these reports for any ε. Query other reports."
    return f"{names[party]} affords least: {show(most)}. Give --epsilon {show(most)} and --new."


def _only_rejecter(shortfall: Shortfall) -> int | None:
    """Return the one helper that rejects reports if the two others reject none, else None."""
    parties = [party for party, counts in enumerate(shortfall.left_out) if sum(counts.values())]
    return parties[0] if len(parties) == 1 else None


def _shortfall_details(shortfall: Shortfall, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{names[party]} left out: "
        + (", ".join(f"{count} {reason.value}" for reason, count in shortfall.left_out[party].items()) or "nothing")
        for party in range(PARTIES)
    )


def _sentence(statuses: Mapping[int, QueryStatus], failures: Mapping[int, Failure], names: Sequence[str]) -> str:
    """Return the helpers' reasons, each text once, with the names of those who report it."""
    sources: dict[str, list[int]] = {}
    for party, failure in failures.items():
        sources.setdefault(failure.reason, []).append(party)
    reasons = "; ".join(f"{' and '.join(names[each] for each in parties)}: {text}" for text, parties in sources.items())
    states = {statuses[party].state for party in failures}
    if QueryState.WITHDRAWN in states:
        return "The query was withdrawn. Nothing was spent."
    if QueryState.EXPIRED in states:
        return f"The answer was released and has expired: {reasons}"
    what = "is disputed" if QueryState.DISPUTED in states else "failed"
    return f"The query {what} while {next(iter(failures.values())).stage.value}. {reasons}"


def _details(failures: Mapping[int, Failure], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        line
        for party, failure in failures.items()
        if failure.shortfall is not None
        for line in (f"according to {names[party]}:", *_shortfall_details(failure.shortfall, names))
    )


def _reports(count: int) -> str:
    return f"{count} report" if count == 1 else f"{count} reports"


def _subject(reason: Rejection, count: int, submitted: int) -> str:
    """Return the start of a sentence: how many of the reports, and why they are not counted."""
    one = count == 1
    everything = "the only report" if one else f"all {count} reports"
    who = everything if count == submitted else f"{count} of {_reports(submitted)}"
    match reason:
        case Rejection.SEEN:
            return f"{who} {'was' if one else 'were'} counted before"
        case Rejection.TOO_LITTLE_LEFT:
            return f"{who} {'has' if one else 'have'} {reason.value}"
        case Rejection.EXPIRED | Rejection.FROM_THE_FUTURE | Rejection.DUPLICATE:
            return f"{who} {'is' if one else 'are'} {reason.value}"
        case Rejection.NOISE_TOO_SMALL:
            return f"{who} {reason.value}"
        case _ if count == submitted:
            return f"none of {_reports(submitted)} can be counted ({reason.value})"
        case _:
            return f"{who} cannot be counted ({reason.value})"
