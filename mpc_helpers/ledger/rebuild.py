"""Create, export and rebuild a helper's ledger, outside the daemon.

A lost ledger is rebuilt from both peers' entries, with all that is undecided counted as taken (COMMIT.md, "A lost
ledger"). It is never restored from a backup: what was taken since would be counted again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpc_helpers.identity.config import HelperConfig, LedgerLocation
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.engine import LEDGER_ID_SIZE, LedgerError, LedgerHead, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger, engine_at
from mpc_helpers.ledger.reports import Entries
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import message_realm
from protocol.keys import SIGNATURE_SIZE, verify_signature
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer

FORMAT = 3
# Tolerance for clock skew and for the hours at which helpers prune.
WATERMARK_SLACK = 86400
# A marker in the data folder: a ledger was created, so a missing one was lost.
LEDGER_CREATED = "ledger-made"
_LABEL = "ledger entries"


@dataclass(frozen=True, slots=True)
class Export:
    """The entries of one helper's ledger, for the peer that lost its own, and the head at which they were read."""

    party: int
    lost_by: int
    entries: Entries
    head: LedgerHead

    def seal(self, membership: Membership) -> bytes:
        """Sign the entries for the helper that lost its own. Run by the helper whose entries they are."""
        entries, content = self.entries, Writer().uint(FORMAT, 2).uint(self.party, 1).uint(self.lost_by, 1)
        content.fixed(self.head.ledger_id, LEDGER_ID_SIZE).uint(self.head.sequence, 8).fixed(
            self.head.digest, HASH_SIZE
        )
        content.uint(entries.watermark, 8).uint(len(entries.digests), 8)
        for column in (entries.digests, entries.left.astype(">u4"), entries.draws):
            content.fixed(np.ascontiguousarray(column).tobytes(), column.nbytes)
        body = content.done()
        signature = membership.identity.sign(_LABEL, _bound(membership) + body)
        return Writer().fixed(signature, SIGNATURE_SIZE).done() + body

    @classmethod
    def open(cls, data: bytes, membership: Membership) -> Export:
        """Verify entries: signed by a peer, for this helper. Run by the helper that lost its ledger."""
        signature, body = data[:SIGNATURE_SIZE], data[SIGNATURE_SIZE:]
        reader = Reader(body)
        version, party, lost_by = reader.uint(2), reader.uint(1), reader.uint(1)
        if version != FORMAT or party not in membership.peers or lost_by != membership.party:
            raise ProtocolError("these are not a peer's entries for this helper", kind=ErrorKind.WRONG_FILE)
        key = membership.helper_set.helpers[party].identity_key
        if not verify_signature(key, _LABEL, _bound(membership) + body, signature):
            message = f"the entries are not signed by {membership.name(party)}"
            raise ProtocolError(message, kind=ErrorKind.BAD_SIGNATURE)
        head = LedgerHead(reader.fixed(LEDGER_ID_SIZE), reader.uint(8), reader.fixed(HASH_SIZE))
        entries = _read_entries(reader)
        reader.finish()
        return cls(party, lost_by, entries, head)


def _bound(membership: Membership) -> bytes:
    return message_realm(membership.helper_set.digest)


def _read_entries(reader: Reader) -> Entries:
    watermark, count = reader.uint(8), reader.uint(8)
    digests = np.frombuffer(reader.fixed(HASH_SIZE * count), dtype=np.uint8).reshape(-1, HASH_SIZE)
    left = np.frombuffer(reader.fixed(4 * count), dtype=">u4").astype(np.uint32)
    return Entries(watermark, digests, left, np.frombuffer(reader.fixed(count), dtype=np.uint8))


def owner_of(membership: Membership) -> LedgerOwner:
    """Return the owner of a helper's ledger."""
    return LedgerOwner(membership.party, membership.identity.public)


def create(config: HelperConfig, membership: Membership) -> None:
    """Create a helper's ledger. Run once, before its first start; never by a daemon: a missing ledger may be lost."""
    marker = config.data / LEDGER_CREATED
    if marker.exists() and not engine_at(config.ledger).exists():
        raise LedgerError(
            f"this helper has had a ledger: {marker} exists",
            "An empty one would count reports again. Rebuild the lost one from both peers: trefoil ledger rebuild",
            kind=ErrorKind.ROLLED_BACK,
        )
    if isinstance(config.ledger, Path):
        config.ledger.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    ReportLedger.create(config.ledger, owner_of(membership))
    write_atomically(marker, b"")


def upgrade(config: HelperConfig, membership: Membership) -> None:
    """Upgrade a ledger of the last format. Run while this helper's daemon is stopped; may be killed and repeated."""
    SqliteEngine(config.ledger_file).upgrade(owner_of(membership))


def take_over(config: HelperConfig, membership: Membership) -> int:
    """Fence the process that holds this helper's ledger, and return how many of its sessions were ended.

    Run on the host that takes over, when the other is dead or paused.
    """
    return engine_at(config.ledger).end_other_sessions(owner_of(membership))


def check(config: HelperConfig, membership: Membership) -> LedgerHead:
    """Verify everything that is stored, and return the chain's head. Run while this helper's daemon is stopped."""
    with closing(ReportLedger(config.ledger, owner_of(membership))) as ledger:
        ledger.verify()
        return ledger.chain.head


def export(config: HelperConfig, membership: Membership, lost_by: int, path: Path) -> None:
    """Write the entries for the peer `lost_by`. Run while this helper's daemon is stopped: it locks the ledger."""
    if lost_by not in membership.peers:
        raise TrefoilError(f"helper {lost_by + 1} is not a peer", kind=ErrorKind.UNKNOWN_NAME)
    with closing(ReportLedger(config.ledger, owner_of(membership))) as ledger:
        entries, head = ledger.reports.export(), ledger.chain.head
    _note_move(_exported(config, lost_by), head.ledger_id, head.sequence)
    write_atomically(path, Export(membership.party, lost_by, entries, head).seal(membership), 0o600)


def _exported(config: HelperConfig, lost_by: int) -> Path:
    """Return the file that says how far this ledger was when it was last exported for a peer."""
    return config.data / f"ledger-exported-{lost_by + 1}"


def _accepted(config: HelperConfig, party: int) -> Path:
    """Return the file that says how far this ledger was at the export from which a peer's ledger was rebuilt."""
    return config.data / f"ledger-accepted-{party + 1}"


def _note_move(path: Path, ledger_id: bytes, sequence: int) -> None:
    write_atomically(path, f"{ledger_id.hex()} {sequence}".encode())


def _noted_move(path: Path, ledger_id: bytes) -> int:
    """Return a move of this ledger that was noted; 0 if none was, or of the ledger that this one replaced."""
    noted_id, _, sequence = path.read_text().partition(" ") if path.exists() else ("", "", "")
    return int(sequence) if noted_id == ledger_id.hex() else 0


def rebuilt_from(config: HelperConfig, ledger_id: bytes) -> dict[int, int]:
    """Return the least move of this ledger that each peer with a rebuilt ledger must know."""
    return {party: _noted_move(_accepted(config, party), ledger_id) for party in range(PARTIES)}


def rebuild(
    config: HelperConfig, membership: Membership, files: list[Path], now: int, *, all_spent: bool = False
) -> None:
    """Rebuild this helper's lost ledger from the entries of both peers, or with nothing left of all that they list.

    A watermark later than this helper's own report lifetime allows is refused: otherwise a malicious peer could have
    all reports rejected, by signing a large number.
    """
    exports = [_read(path, membership) for path in files]
    if {entry.party for entry in exports} != set(membership.peers) or len(exports) != len(membership.peers):
        raise TrefoilError(
            "a lost ledger is rebuilt from the entries of both peers",
            "Ask both operators for: trefoil ledger export",
            kind=ErrorKind.TOO_FEW,
        )
    for entry in exports:
        if entry.entries.watermark > now - config.report_lifetime + WATERMARK_SLACK:
            raise TrefoilError(
                f"{membership.name(entry.party)} claims to have pruned reports that must still be counted",
                "Compare clocks and report_lifetime_days with its operator; do not rebuild from this file.",
                kind=ErrorKind.OUT_OF_RANGE,
            )
    # Peers admit no report that is from the future, so none of these is later than their clocks allow.
    newest = now + WATERMARK_SLACK
    heads = {entry.party: entry.head for entry in exports}
    entries = [entry.entries for entry in exports]
    if all_spent:
        entries = [replace(one, left=np.zeros_like(one.left)) for one in entries]
    rebuild_ledger(config.ledger, owner_of(membership), entries, newest, heads)
    # The data folder may have been lost too; `create` must refuse after a second loss as well.
    write_atomically(config.data / LEDGER_CREATED, b"")


def rebuild_ledger(
    location: LedgerLocation,
    owner: LedgerOwner,
    entries: Sequence[Entries],
    newest: int,
    heads: Mapping[int, LedgerHead] | None = None,
    *,
    entropy: Callable[[int], bytes] = os.urandom,
) -> None:
    """Create a new ledger that leaves of each report the less of what both peers leave, atomically.

    `newest` is a time that no report of them is after: they are forgotten when the watermark has reached it. `heads`
    are those of the peers' ledgers: a peer whose ledger goes back behind its own entries is noticed.
    """
    if len(entries) != 2:
        raise LedgerError(
            "a lost ledger is rebuilt from the entries of both peers",
            "Or retire this helper's keys.",
            kind=ErrorKind.TOO_FEW,
        )
    with engine_at(location).draft() as draft:
        draft.create(owner, entropy(LEDGER_ID_SIZE))
        with closing(ReportLedger(draft, owner)) as ledger:
            ledger.reports.import_from_peers(entries, newest)
            for party, head in (heads or {}).items():
                ledger.peer_heads.remember(party, head)
            ledger.peer_heads.save()


def accept_peer(config: HelperConfig, membership: Membership, party: int) -> None:
    """Forget the head of a peer's ledger, once both honest operators have verified that it was rebuilt.

    Refused if that peer voted YES, or may have, for an attempt that was reserved here after its entries were exported:
    a ledger that was rebuilt from them does not know what that attempt took. One that was rebuilt from an older file is
    refused by the daemon, when it says how far it knows this ledger (`rebuilt_from`).
    """
    if party not in membership.peers:
        raise TrefoilError(f"helper {party + 1} is not a peer", kind=ErrorKind.UNKNOWN_NAME)
    with closing(ReportLedger(config.ledger, owner_of(membership))) as ledger:
        ledger_id = ledger.chain.ledger_id
        exported = _noted_move(_exported(config, party), ledger_id)
        if ledger.attempts.voted_since(party, exported):
            raise LedgerError(
                f"{membership.name(party)} has voted, or may have, since this helper last exported its entries for it",
                "Export again, have it rebuild its ledger from both peers' new files, and then accept it.",
                kind=ErrorKind.ROLLED_BACK,
            )
        # First: what is accepted without it could have been rebuilt from an older file than the last.
        _note_move(_accepted(config, party), ledger_id, exported)
        ledger.peer_heads.forget(party)


def _read(path: Path, membership: Membership) -> Export:
    try:
        return Export.open(path.read_bytes(), membership)
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None
    except ProtocolError as error:
        hint = "Ask that helper's operator to export again, for this helper."
        raise TrefoilError(f"{path}: {error}", hint, kind=error.kind) from None
