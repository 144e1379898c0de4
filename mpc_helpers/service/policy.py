"""Which queries this helper accepts: decided from the query alone, before anything is uploaded or spent.

A query is authenticated by its signature, checked against the key that the operator registered for its site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms
from protocol.errors import ErrorKind, TrefoilError
from protocol.query import Query, SignedQuery, Withdrawal, check_permit


class RefusalReason(Enum):
    """Why a request is refused, with the HTTP status and the kind of error that it becomes."""

    STRANGER = 403, ErrorKind.FORBIDDEN
    UNKNOWN = 404, ErrorKind.UNKNOWN_NAME
    CHANGED = 409, ErrorKind.INCONSISTENT
    VOTED = 409, ErrorKind.ALREADY_COUNTED
    ENDED = 410, ErrorKind.EXPIRED
    TOO_LARGE = 413, ErrorKind.TOO_LARGE
    UNWILLING = 422, ErrorKind.REFUSED
    NOT_YET = 425, ErrorKind.UNAVAILABLE
    BUSY = 429, ErrorKind.BUSY
    DISK = 507, ErrorKind.NO_SPACE


class Refusal(TrefoilError):
    """A request this helper does not serve."""

    def __init__(self, reason: RefusalReason, message: str, hint: str = "") -> None:
        self.http_status, kind = reason.value
        super().__init__(message, hint, kind=kind)


@contextmanager
def _refusing(reason: RefusalReason) -> Iterator[None]:
    """Turn an error of the block into a refusal."""
    try:
        yield
    except TrefoilError as error:
        raise Refusal(reason, str(error), error.hint) from None


class Policy:
    """What the operator of this helper has registered and allows."""

    def __init__(self, membership: Membership, config: HelperConfig, clock: Callable[[], int]) -> None:
        self._membership = membership
        # Replaced as a whole by a reload.
        self.sites = config.sites
        self._config = config
        self.failed_proofs = FailedProofs(config.failed_proofs)
        self._clock = clock

    def authenticate(self, signed: SignedQuery) -> None:
        """Require the signature of the site's registered key, and a caller that is registered for the site."""
        query = signed.query
        site = self.sites.get(query.site)
        if site is None:
            raise Refusal(
                RefusalReason.STRANGER,
                f"this helper answers no queries of {query.site}",
                "Ask its operator to register the site's key.",
            )
        with _refusing(RefusalReason.STRANGER):
            signed.verify(site.key)
        if query.caller not in site.callers:
            raise Refusal(
                RefusalReason.STRANGER,
                f"{query.caller} is not a registered caller of {query.site}",
                "Ask the helper's operator to register the caller for the site.",
            )

    def authenticate_withdrawal(self, withdrawal: Withdrawal) -> None:
        """Require that the query and its withdrawal are signed with the same registered key."""
        self.authenticate(withdrawal.signed)
        with _refusing(RefusalReason.STRANGER):
            withdrawal.verify(self.sites[withdrawal.signed.query.site].key)

    def check_permit(self, query: Query, permit: bytes) -> None:
        """Require the querier's permit to upload a column to this helper."""
        site = self.sites.get(query.site)
        if site is None:
            raise Refusal(RefusalReason.STRANGER, f"this helper no longer answers queries of {query.site}")
        with _refusing(RefusalReason.STRANGER):
            check_permit(query, self._membership.party, permit, site.key)

    def check_acceptable(self, query: Query, running: Sequence[Query]) -> None:
        """Refuse a query outside this helper's limits, given the queries that have not ended yet."""
        self._check_terms(query)
        self._check_noise(query)
        self._check_load(query, running)

    def _check_terms(self, query: Query) -> None:
        limits, now = self._config.limits, self._clock()
        if not (query.shape.checked or query.debug or self._config.unchecked_histograms):
            raise Refusal(
                RefusalReason.UNWILLING,
                "the reports have no cap, so this helper could not check their numbers",
                "Collect checked reports, as devices make them; or ask the operators for unchecked_histograms.",
            )
        if query.keeps_rest and not self._config.spend_in_parts:
            number = self._membership.party + 1
            raise Refusal(
                RefusalReason.UNWILLING,
                f"helper {number} uses reports up and does not keep the rest of them (spend_in_parts is off)",
                f"Use --use-up, or ask the operator of helper {number} for spend_in_parts.",
            )
        if query.helper_set not in {each.digest for each in self._membership.known_sets}:
            raise Refusal(
                RefusalReason.UNWILLING, "the query names another helper set", "Use the current helpers.json."
            )
        if not (limits.minimum_reports <= query.batch_size <= limits.maximum_reports):
            accepted = f"{limits.minimum_reports} to {limits.maximum_reports}"
            raise Refusal(
                RefusalReason.UNWILLING, f"a batch of {query.batch_size}; this helper accepts {accepted} reports"
            )
        if now >= query.deadline:
            message = f"the query's deadline passed {now - query.deadline} s ago"
            raise Refusal(
                RefusalReason.UNWILLING, message, "Make a new query with --new; if it is new, compare the clocks."
            )
        if query.deadline > now + limits.seconds:
            raise Refusal(
                RefusalReason.UNWILLING,
                f"the deadline is {query.deadline - now} s away; this helper accepts 1 to {limits.seconds}",
                "Choose another deadline; if it looks right, compare the clocks.",
            )

    def _check_noise(self, query: Query) -> None:
        """Refuse a noise mode that is not enabled, and joint noise after too many failed proofs."""
        if query.noise not in self._config.noise_modes:
            modes = " or ".join(mode.value for mode in self._config.noise_modes)
            message = f"this helper does not run the noise mode {query.noise.value}"
            raise Refusal(RefusalReason.UNWILLING, message, f"Use --noise {modes}, or ask its operator.")
        if SumKind.of(query.noise).program.proves and not query.debug:
            try:
                self.failed_proofs.check_not_full()
            except TrefoilError as error:
                hint = "Use --noise local, or ask this helper's operator to run: trefoil alarm show"
                raise Refusal(RefusalReason.UNWILLING, str(error), hint) from None

    def check_cost(self, query: Query) -> None:
        """Refuse noise that cannot be drawn. Run in a thread: a hostile ε and Δ take 155 ms to see that of `joint`."""
        with _refusing(RefusalReason.UNWILLING):
            SumTerms.of(query).check_cost()

    def _check_load(self, query: Query, running: Sequence[Query]) -> None:
        limits = self._config.limits
        if len(running) >= limits.waiting:
            raise Refusal(RefusalReason.BUSY, f"this helper has {len(running)} queries waiting", "Retry later.")
        if sum(other.site == query.site for other in running) >= limits.queries_per_site:
            raise Refusal(
                RefusalReason.BUSY, f"{query.site} has too many queries waiting", "Wait for one of them to end."
            )
