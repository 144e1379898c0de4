"""What a report must satisfy to count in a query at one helper, and the one byte that says what became of it.

A bad report is dropped and counted under one `Rejection`; the query goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mpc_helpers.identity.membership import Membership
from protocol.errors import Rejection
from protocol.hpke import Suite
from protocol.left_out import code_of
from protocol.query import Query

Reasons = npt.NDArray[np.uint8]

ADMITTED = 0
# A report's fate as one byte: 0, or one more than the number of its rejection.
CODE_OF: Mapping[Rejection, int] = {reason: code_of(reason) for reason in Rejection}
REASON_OF: Mapping[int, Rejection] = {code: reason for reason, code in CODE_OF.items()}


@dataclass(frozen=True, slots=True)
class OpeningKey:
    """One of this helper's private HPKE keys, with the span in which devices may have sealed to it."""

    helper_set: bytes
    key_id: bytes
    not_before: int
    not_after: int
    suite: Suite
    private: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a report must satisfy to count in this query at this helper. Plain data: it travels to worker processes."""

    party: int
    query: Query
    keys: tuple[OpeningKey, ...]
    oldest: int
    newest: int

    @classmethod
    def for_query(cls, membership: Membership, query: Query, *, oldest: int, newest: int) -> AdmissionRules:
        """The keys a report may name are those this helper has in any of the sets it knows and still holds."""
        keys = [
            OpeningKey(known.digest, config.key.key_id, config.not_before, config.not_after, private.suite, private.raw)
            for known in membership.known_sets
            for config in known.helpers[membership.party].hpke_keys
            if (private := membership.hpke.get(config.key)) is not None and private.suite is query.suite
        ]
        return cls(membership.party, query, tuple(keys), oldest, newest)
