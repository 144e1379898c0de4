"""Permits: who may upload a query's column to a helper (SPEC.md §5).

A signed query reaches all three helpers, so each of them could upload something in the querier's place to another. A
permit is for one helper, and reaches that one only: whoever else begins an upload is refused before its first byte.
"""

from __future__ import annotations

from protocol.errors import ProtocolError
from protocol.keys import IdentityKey, verify_signature
from protocol.query import Query
from protocol.shares import PARTIES
from protocol.wire import Writer

PERMIT_HEADER = "Trefoil-Permit"
_SIGNATURE_LABEL = "column upload"


def make_permits(query: Query, key: IdentityKey) -> tuple[bytes, ...]:
    """Run by the querier: one for each helper, in order."""
    return tuple(key.sign(_SIGNATURE_LABEL, _signed_bytes(query, party)) for party in range(PARTIES))


def check_permit(query: Query, party: int, permit: bytes, site_key: bytes) -> None:
    """Run by helper `party`, with the key its configuration has for the query's site."""
    if not verify_signature(site_key, _SIGNATURE_LABEL, _signed_bytes(query, party), permit):
        raise ProtocolError(
            f"the upload comes without the permit of {query.site} for this helper",
            "Upload with the saved query that was signed, or ask a new one with --new.",
        )


def _signed_bytes(query: Query, party: int) -> bytes:
    return query.digest + Writer().uint(party, 1).done()
