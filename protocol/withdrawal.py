"""A withdrawal: the querier takes a query back, under the key that signed it (SPEC.md §5).

Whoever holds a signed query can hand it to a helper again. Without a withdrawal a bad helper could let a query fail,
wait until its querier has asked another, and then revive the first, so that the second finds its reports spent. A
helper that has taken a withdrawal never votes for the query. All three must vote, so one honest helper is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ProtocolError
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.query import SignedQuery
from protocol.wire import Reader, Writer

MAX_SIGNED_QUERY = 8192
MAX_WITHDRAWAL = MAX_SIGNED_QUERY + 4 + SIGNATURE_SIZE
_SIGNATURE_LABEL = "query withdrawal"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The whole signed query with it, so that a helper that has never seen the query will not take it later either."""

    signed: SignedQuery
    signature: bytes

    @classmethod
    def sign(cls, signed: SignedQuery, key: IdentityKey) -> Withdrawal:
        """Run by the querier."""
        return cls(signed, key.sign(_SIGNATURE_LABEL, signed.query.digest))

    def verify(self, site_key: bytes) -> None:
        """Run by a helper, with the key its configuration has for the query's site."""
        if not verify_signature(site_key, _SIGNATURE_LABEL, self.signed.query.digest, self.signature):
            raise ProtocolError(
                f"the withdrawal is not signed by the key registered for {self.signed.query.site}",
                "Sign with the key that signed the query.",
            )

    def encode(self) -> bytes:
        """The message."""
        return Writer().blob(self.signed.encode()).fixed(self.signature, SIGNATURE_SIZE).done()

    @classmethod
    def decode(cls, data: bytes) -> Withdrawal:
        """The withdrawal in `data`; the signature is checked by `verify`."""
        reader = Reader(data)
        signed = SignedQuery.decode(reader.blob(limit=MAX_SIGNED_QUERY))
        signature = reader.fixed(SIGNATURE_SIZE)
        reader.finish()
        return cls(signed, signature)
