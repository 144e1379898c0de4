"""A ledger's life outside the daemon: made once, and made again from both peers' entries if it was lost.

What a helper hands a peer that has lost its ledger is every report that is not free, signed, in one file.

A lost ledger is rebuilt as the union of both peers' entries, all counted as spent (COMMIT.md, "A lost ledger"). It is
never restored from a backup, which would let reports that were spent since be counted again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.file import LedgerError, LedgerOwner, drafted
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.reports import Entries
from protocol.errors import ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import realm
from protocol.keys import SIGNATURE_SIZE, verify_signature
from protocol.wire import HASH_SIZE, Reader, Writer

FORMAT = 2
# What two helpers' clocks, and the hours at which they tidy up, may differ by.
WATERMARK_SLACK = 86400
# In the data folder from the day that a ledger was made: what is missing since was lost.
LEDGER_MADE = "ledger-made"
_LABEL = "ledger entries"


@dataclass(frozen=True, slots=True)
class Export:
    """The entries of one helper's ledger, for the peer that lost its own."""

    party: int
    lost_by: int
    entries: Entries

    def seal(self, membership: Membership) -> bytes:
        """Run by the helper whose entries they are: signed for the helper that lost its own."""
        entries, content = self.entries, Writer().uint(FORMAT, 2).uint(self.party, 1).uint(self.lost_by, 1)
        digests = np.ascontiguousarray(entries.digests).tobytes()
        content.uint(entries.watermark, 8).uint(len(entries.digests), 8).fixed(digests, len(digests))
        body = content.done()
        signature = membership.identity.sign(_LABEL, _bound(membership) + body)
        return Writer().fixed(signature, SIGNATURE_SIZE).done() + body

    @classmethod
    def open(cls, data: bytes, membership: Membership) -> Export:
        """Run by the helper that lost its ledger: believed only with a peer's signature, and meant for this helper."""
        signature, body = data[:SIGNATURE_SIZE], data[SIGNATURE_SIZE:]
        reader = Reader(body)
        version, party, lost_by = reader.uint(2), reader.uint(1), reader.uint(1)
        if version != FORMAT or party not in membership.peers or lost_by != membership.party:
            raise ProtocolError("these are not a peer's entries for this helper")
        key = membership.helper_set.helpers[party].identity_key
        if not verify_signature(key, _LABEL, _bound(membership) + body, signature):
            raise ProtocolError(f"the entries are not signed by {membership.name(party)}")
        entries = _read_entries(reader)
        reader.finish()
        return cls(party, lost_by, entries)


def _bound(membership: Membership) -> bytes:
    return realm(membership.helper_set.digest)


def _read_entries(reader: Reader) -> Entries:
    watermark, count = reader.uint(8), reader.uint(8)
    digests = np.frombuffer(reader.fixed(HASH_SIZE * count), dtype=np.uint8).reshape(-1, HASH_SIZE)
    return Entries(watermark, digests)


def owner_of(membership: Membership) -> LedgerOwner:
    """Whose ledger a helper's is."""
    return LedgerOwner(membership.party, membership.identity.public)


def create(config: HelperConfig, membership: Membership) -> None:
    """Run once, before a helper's first start. A daemon never does it: a ledger that is not there may be lost."""
    marker = config.data / LEDGER_MADE
    if marker.exists() and not config.ledger.exists():
        raise LedgerError(
            f"this helper has had a ledger ({marker} says so)",
            "An empty one would count reports again. Rebuild the lost one from both peers: trefoil ledger rebuild",
        )
    config.ledger.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    ReportLedger.create(config.ledger, owner_of(membership))
    write_atomically(marker, b"")


def export(config: HelperConfig, membership: Membership, lost_by: int, path: Path) -> None:
    """Write what the peer `lost_by` needs. Run while this helper's daemon is stopped: it holds its ledger."""
    if lost_by not in membership.peers:
        raise TrefoilError(f"helper {lost_by + 1} is not one of the two others")
    with closing(ReportLedger(config.ledger, owner_of(membership))) as ledger:
        entries = ledger.reports.export()
    write_atomically(path, Export(membership.party, lost_by, entries).seal(membership), 0o600)


def rebuild(config: HelperConfig, membership: Membership, files: list[Path], now: int) -> None:
    """Make this helper's lost ledger again from the entries of both peers.

    A watermark above what this helper's own lifetime of reports gives is refused: a bad peer could otherwise have all
    reports refused for as long as it likes, by a signature on a large number.
    """
    exports = [_read(path, membership) for path in files]
    if {found.party for found in exports} != set(membership.peers) or len(exports) != len(membership.peers):
        raise TrefoilError(
            "a lost ledger is rebuilt from the entries of both peers",
            "Ask both operators for: trefoil ledger export",
        )
    for found in exports:
        if found.entries.watermark > now - config.report_lifetime + WATERMARK_SLACK:
            raise TrefoilError(
                f"{membership.name(found.party)} claims to have forgotten reports that must still be counted",
                "Compare clocks and report_lifetime_days with its operator; do not rebuild from this file.",
            )
    rebuild_ledger(config.ledger, owner_of(membership), [found.entries for found in exports])


def rebuild_ledger(
    path: Path, owner: LedgerOwner, entries: Sequence[Entries], *, entropy: Callable[[int], bytes] = os.urandom
) -> None:
    """After a loss: a new ledger that counts everything both peers hold as spent, or no ledger at all."""
    if len(entries) != 2:
        raise LedgerError("a lost ledger is rebuilt from the entries of both peers", "Or retire this helper's keys.")
    with drafted(path) as draft:
        draft.unlink()
        ReportLedger.create(draft, owner, entropy=entropy)
        with closing(ReportLedger(draft, owner)) as ledger:
            for peer in entries:
                ledger.reports.import_as_spent(peer)


def accept_peer(config: HelperConfig, membership: Membership, party: int) -> None:
    """Forget how far a peer's ledger had come, once both honest operators have seen that it was rebuilt."""
    if party not in membership.peers:
        raise TrefoilError(f"helper {party + 1} is not one of the two others")
    with closing(ReportLedger(config.ledger, owner_of(membership))) as ledger:
        ledger.peer_heads.forget(party)


def _read(path: Path, membership: Membership) -> Export:
    try:
        return Export.open(path.read_bytes(), membership)
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}") from None
    except ProtocolError as error:
        raise TrefoilError(f"{path}: {error}", "Ask that helper's operator to export again, for this helper.") from None
