"""When keys and certificates of the helper set end: known long before, so that a new set is signed in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpc_helpers.identity import tls
from mpc_helpers.identity.membership import Membership
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.metrics import Labels
from protocol.seconds import DAY

# A new set needs three operators, and devices fetch it in their own time.
KEY_NOTICE = 14 * DAY
CERTIFICATE_NOTICE = 30 * DAY


@dataclass(frozen=True, slots=True)
class Expiry:
    """Of all three helpers, as one of them sees them: a set without one helper's key is of no use to any."""

    membership: Membership
    # Certificates (DER) of the helpers whose certificate was seen.
    certificates: Callable[[], Mapping[int, bytes]]
    clock: Callable[[], int]

    def keys(self) -> Mapping[Labels, float]:
        """When devices stop sealing to each key of the current set."""
        return {
            (("helper", helper.name), ("key", entry.key.key_id.hex())): float(entry.not_after)
            for helper in self.membership.helper_set.helpers
            for entry in helper.hpke_keys
        }

    def certificate_ends(self) -> Mapping[Labels, float]:
        """When each certificate ends, of those that were seen."""
        return {
            (("helper", self.membership.name(party)),): float(tls.ends(der))
            for party, der in self.certificates().items()
        }

    def reasons(self) -> list[Reason]:
        """What ends soon, or has ended."""
        last_keys = {
            helper.name: max(entry.not_after for entry in helper.hpke_keys)
            for helper in self.membership.helper_set.helpers
        }
        ends = {self.membership.name(party): tls.ends(der) for party, der in self.certificates().items()}
        return [
            # Reports that were sealed in time are still answered; helpers without a certificate do not talk.
            *self._soon(Concern.KEY, "the last HPKE key", last_keys, KEY_NOTICE, stops=False),
            *self._soon(Concern.CERTIFICATE, "the certificate", ends, CERTIFICATE_NOTICE, stops=True),
        ]

    def _soon(self, concern: Concern, what: str, ends: Mapping[str, int], notice: int, *, stops: bool) -> list[Reason]:
        now = self.clock()
        found = []
        for name, end in ends.items():
            if now >= end:
                found.append(Reason(concern, f"{what} of {name} ended on {_date(end)}: sign a new set", stops))
            elif now >= end - notice:
                found.append(Reason(concern, f"{what} of {name} ends on {_date(end)}: prepare a new set"))
        return found


def _date(moment: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))
