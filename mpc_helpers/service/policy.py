"""Who may ask this helper what: decided from the query alone, before anything is uploaded or spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.terms import SumKind, SumTerms
from mpc_helpers.service.refusal import Refusal, Trouble
from protocol.errors import ProtocolError, TrefoilError
from protocol.permit import check_permit
from protocol.query import Query, SignedQuery
from protocol.withdrawal import Withdrawal


class Policy:
    """What this helper's operator registered and allows. A query is authenticated by its signature alone."""

    def __init__(
        self, membership: Membership, config: HelperConfig, failed_proofs: FailedProofs, clock: Callable[[], int]
    ) -> None:
        self._membership = membership
        # Replaced as a whole when the configuration is read again.
        self.sites = config.sites
        self._limits = config.limits
        self._noise_modes = config.noise_modes
        self._unchecked = config.unchecked_histograms
        self._failed_proofs = failed_proofs
        self._clock = clock

    def authenticate(self, signed: SignedQuery) -> None:
        """Signed with the key that was registered for the site, by a caller that may ask for it."""
        query = signed.query
        site = self.sites.get(query.site)
        if site is None:
            raise Refusal(
                Trouble.STRANGER,
                f"this helper answers no queries of {query.site}",
                "Ask its operator to register the site's key.",
            )
        try:
            signed.verify(site.key)
        except ProtocolError as error:
            raise Refusal(Trouble.STRANGER, str(error), error.hint) from None
        if query.caller not in site.callers:
            raise Refusal(
                Trouble.STRANGER,
                f"{query.caller} may not ask for {query.site}",
                "Ask the helper's operator to register the caller for the site.",
            )

    def authenticate_withdrawal(self, withdrawal: Withdrawal) -> None:
        """The query, and that whoever signed it takes it back."""
        self.authenticate(withdrawal.signed)
        try:
            withdrawal.verify(self.sites[withdrawal.signed.query.site].key)
        except ProtocolError as error:
            raise Refusal(Trouble.STRANGER, str(error), error.hint) from None

    def check_permit(self, query: Query, permit: bytes) -> None:
        """Whether whoever uploads a column has its querier's permit, for this helper."""
        site = self.sites.get(query.site)
        if site is None:
            raise Refusal(Trouble.STRANGER, f"this helper answers no queries of {query.site} any more")
        try:
            check_permit(query, self._membership.party, permit, site.key)
        except ProtocolError as error:
            raise Refusal(Trouble.STRANGER, str(error), error.hint) from None

    def check_willing(self, query: Query, running: Sequence[Query]) -> None:
        """What this helper will not do, given the queries that it has not finished yet."""
        self._check_terms(query)
        self._check_noise(query)
        self._check_cost(query)
        self._check_room(query, running)

    def _check_terms(self, query: Query) -> None:
        limits, now = self._limits, self._clock()
        if not (query.shape.checked or query.debug or self._unchecked):
            raise Refusal(
                Trouble.UNWILLING,
                "the reports have no cap, so this helper could not check their numbers",
                "Collect checked reports, as devices make them; or ask the operators for unchecked_histograms.",
            )
        if query.helper_set not in {known.digest for known in self._membership.known_sets}:
            raise Refusal(Trouble.UNWILLING, "the query names another helper set", "Use the current helpers.json.")
        if not (limits.minimum_reports <= query.batch_size <= limits.maximum_reports):
            accepted = f"{limits.minimum_reports} to {limits.maximum_reports}"
            raise Refusal(Trouble.UNWILLING, f"a batch of {query.batch_size}; this helper takes {accepted} reports")
        if not (now < query.deadline <= now + limits.seconds):
            raise Refusal(
                Trouble.UNWILLING,
                f"the deadline is {query.deadline - now} s away; this helper accepts 1 to {limits.seconds}",
                "Ask with another deadline; if it looks right, compare the clocks.",
            )

    def _check_noise(self, query: Query) -> None:
        """An operator lists the modes that this helper runs, and joint noise ends with too many failed proofs."""
        if query.noise not in self._noise_modes:
            modes = " or ".join(mode.value for mode in self._noise_modes)
            message = f"this helper does not run the noise mode {query.noise.value}"
            raise Refusal(Trouble.UNWILLING, message, f"Ask with --noise {modes}, or ask its operator.")
        if SumKind.of(query.noise).program.proves and not query.debug:
            try:
                self._failed_proofs.check_room()
            except TrefoilError as error:
                hint = "Ask with --noise local, or ask this helper's operator, who can look: trefoil alarm show"
                raise Refusal(Trouble.UNWILLING, str(error), hint) from None

    def _check_cost(self, query: Query) -> None:
        try:
            SumTerms.of(query).check_cost()
        except TrefoilError as error:
            raise Refusal(Trouble.UNWILLING, str(error), error.hint) from None

    def _check_room(self, query: Query, running: Sequence[Query]) -> None:
        if len(running) >= self._limits.waiting:
            raise Refusal(Trouble.BUSY, f"this helper has {len(running)} queries waiting", "Try again later.")
        if sum(other.site == query.site for other in running) >= self._limits.queries_per_site:
            raise Refusal(Trouble.BUSY, f"{query.site} has too many queries waiting", "Wait for one of them to end.")
