"""Helper sets as files that three operators pass around: put together by one, signed by each, checked by all."""

from __future__ import annotations

import json
from pathlib import Path

from protocol.errors import ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import HelperEntry, HelperSet, entry_from_json
from protocol.json_message import decode_json
from protocol.keys import load_identity
from protocol.shares import PARTIES


def put_together(entries: list[Path], number: int, path: Path) -> HelperSet:
    """A set of three entries, in the order given, still without signatures."""
    if len(entries) != PARTIES:
        raise TrefoilError(f"a helper set has three entries, not {len(entries)}", "Name three entry files.")
    if path.exists():
        raise TrefoilError(f"{path} exists already", "Choose another name, or move it away.")
    first, second, third = (read_entry(entry) for entry in entries)
    helper_set = HelperSet(number, (first, second, third))
    write_set(path, helper_set)
    return helper_set


def add_signature(path: Path, key: Path) -> HelperSet:
    """Sign a set with one helper's identity. Its operator has compared the digest with the other two."""
    helper_set = HelperSet.load_unverified(path).signed_by(load_identity(key))
    write_set(path, helper_set)
    return helper_set


def join(paths: list[Path], path: Path) -> HelperSet:
    """Copies of one set, each with some of the signatures, as one file with all of them."""
    copies = [HelperSet.load_unverified(copy) for copy in paths]
    joined = copies[0]
    if any(copy.signed_bytes() != joined.signed_bytes() for copy in copies):
        raise TrefoilError("these are not copies of the same helper set", "Start again from one file.")
    signatures = [b""] * PARTIES
    for copy in copies:
        for position, signature in enumerate(copy.padded_signatures):
            signatures[position] = signature or signatures[position]
    joined = HelperSet(joined.number, joined.helpers, tuple(signatures))
    write_set(path, joined)
    return joined


def write_set(path: Path, helper_set: HelperSet) -> None:
    """Replace the file in one step."""
    write_atomically(path, (json.dumps(helper_set.to_json(), indent=2) + "\n").encode())


def read_entry(path: Path) -> HelperEntry:
    """What `trefoil keygen helper` wrote for others to see."""
    try:
        return entry_from_json(decode_json(path.read_bytes()))
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", "Make one with: trefoil keygen helper") from None
    except ProtocolError as error:
        raise TrefoilError(f"{path} is not a helper's public entry: {error}") from None
