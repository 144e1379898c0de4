"""What a person reads when three helpers give no answer: one sentence, and the details for whoever asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from protocol.errors import Rejection
from protocol.querier.query_failed import QueryFailed
from protocol.shares import PARTIES
from protocol.status import Failure, QueryState, QueryStatus, Shortfall


def refusal(statuses: Mapping[int, QueryStatus], names: Sequence[str]) -> QueryFailed:
    """The error for a query that ended without an answer at some helpers."""
    failures = {party: status.failure for party, status in sorted(statuses.items()) if status.failure is not None}
    blamed = {failure.party for failure in failures.values()}
    first = next(iter(failures.values()))
    shortfall = _common_shortfall(failures)
    if shortfall is not None:
        message, details = shortfall_sentence(shortfall, names), shortfall_details(shortfall, names)
        blamed = {_who_alone(shortfall)}
    else:
        message, details = _sentence(statuses, failures, names), _details(failures, names)
    helpers = tuple(sorted(party for party in blamed if party is not None)) or tuple(failures)
    hint = first.hint if shortfall is None else _hint(shortfall, first.hint)
    return QueryFailed(first.stage.value, helpers, message, hint, details=details, shortfall=shortfall)


def _common_shortfall(failures: Mapping[int, Failure]) -> Shortfall | None:
    """What all that report say alike. Where they differ one of them lies, and each is quoted with its name."""
    found = [failure.shortfall for failure in failures.values()]
    return found[0] if all(each == found[0] for each in found) else None


def shortfall_sentence(shortfall: Shortfall, names: Sequence[str]) -> str:
    """Too few reports, in one sentence: with the reason if all three give the same, with a name if it is one."""
    return f"Refused: {_why_too_few(shortfall, names)}. Nothing was spent."


def _why_too_few(shortfall: Shortfall, names: Sequence[str]) -> str:
    submitted = _reports(shortfall.submitted)
    left = f"{shortfall.accepted} can be counted and {shortfall.needed} are needed"
    alone = _who_alone(shortfall)
    if alone is not None:
        return f"{names[alone]} alone leaves out {sum(shortfall.left_out[alone].values())} of {submitted}; {left}"
    first, second, third = shortfall.left_out
    if not first or not (first == second == third):
        return f"of {submitted} {left}"
    reason = max(first, key=lambda reason: first[reason])
    main, rest = first[reason], sum(first.values()) - first[reason]
    also = f", and {rest} cannot be counted" if rest else ""
    return f"{_subject(reason, main, shortfall.submitted)}{also}" + (f"; {left}" if shortfall.accepted else "")


def _hint(shortfall: Shortfall, otherwise: str) -> str:
    """What helps where all three leave reports out for one reason; more reports of that kind would not."""
    first, second, third = shortfall.left_out
    if not first or not (first == second == third):
        return otherwise
    match max(first, key=lambda reason: first[reason]):
        case Rejection.SEEN:
            return "Show the earlier answers with --list, or ask about reports that no answer has counted."
        case Rejection.WRONG_HELPER_SET:
            return "Give the helper set that the reports were sealed to with --helpers, and --new."
        case Rejection.NOISE_TOO_SMALL:
            return "Give a smaller --epsilon, or none, and --new."
        case _:
            return otherwise


def _who_alone(shortfall: Shortfall) -> int | None:
    """The one helper that leaves reports out, if the two others leave out none."""
    found = [party for party, counts in enumerate(shortfall.left_out) if sum(counts.values())]
    return found[0] if len(found) == 1 else None


def shortfall_details(shortfall: Shortfall, names: Sequence[str]) -> tuple[str, ...]:
    """What each helper left out, a line for each."""
    return tuple(
        f"{names[party]} left out: "
        + (", ".join(f"{count} {reason.value}" for reason, count in shortfall.left_out[party].items()) or "nothing")
        for party in range(PARTIES)
    )


def _sentence(statuses: Mapping[int, QueryStatus], failures: Mapping[int, Failure], names: Sequence[str]) -> str:
    """What the helpers say, each text once, with who says it."""
    said: dict[str, list[int]] = {}
    for party, failure in failures.items():
        said.setdefault(failure.reason, []).append(party)
    reasons = "; ".join(f"{' and '.join(names[party] for party in parties)}: {text}" for text, parties in said.items())
    states = {statuses[party].state for party in failures}
    if QueryState.WITHDRAWN in states:
        return "The query was withdrawn. Nothing was spent."
    if QueryState.EXPIRED in states:
        return f"The answer was released, and is gone: {reasons}"
    what = "is disputed" if QueryState.DISPUTED in states else "failed"
    return f"The query {what} while {_doing(next(iter(failures.values())).stage)}. {reasons}"


def _details(failures: Mapping[int, Failure], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        line
        for party, failure in failures.items()
        if failure.shortfall is not None
        for line in (f"as {names[party]} has it:", *shortfall_details(failure.shortfall, names))
    )


def _reports(count: int) -> str:
    return f"{count} report" if count == 1 else f"{count} reports"


def _doing(stage: QueryState) -> str:
    match stage:
        case QueryState.AWAITING:
            return "the helpers waited for its reports"
        case QueryState.QUEUED:
            return "it waited for its turn"
        case QueryState.ADMITTING:
            return "the helpers opened the reports"
        case QueryState.AGREEING:
            return "the helpers agreed on the reports"
        case QueryState.COMPUTING:
            return "the helpers computed"
        case QueryState.VOTING:
            return "the helpers voted"
        case QueryState.RELEASED | QueryState.FAILED | QueryState.DISPUTED:
            return "the helpers ended it"
        case QueryState.WITHDRAWN | QueryState.EXPIRED:
            return "it was over"
        case _:
            assert_never(stage)


def _subject(reason: Rejection, count: int, submitted: int) -> str:
    """So many of the reports, and what is true of them."""
    who = f"all {_reports(submitted)}" if count == submitted else f"{count} of {_reports(submitted)}"
    one = count == 1
    match reason:
        case Rejection.SEEN:
            return f"{who} {'was' if one else 'were'} counted before"
        case Rejection.EXPIRED | Rejection.FROM_THE_FUTURE | Rejection.DUPLICATE:
            return f"{who} {'is' if one else 'are'} {reason.value}"
        case Rejection.NOISE_TOO_SMALL:
            return f"{who} {reason.value}"
        case _ if count == submitted:
            return f"none of {_reports(submitted)} can be counted ({reason.value})"
        case _:
            return f"{who} cannot be counted ({reason.value})"
