"""A renewed helper set for tests: what three operators do when a key is prolonged, in one call."""

from __future__ import annotations

import json
from dataclasses import replace

from mpc_helpers.local.launcher import Trio
from protocol.helper_set import HelperSet, write_set
from protocol.keys import load_identity
from protocol.shares import PARTIES


def renew(trio: Trio) -> HelperSet:
    """A new set in which helper 1's HPKE key lasts a second longer: another digest. They know the old ones too."""
    old = trio.helper_set
    write_set(trio.folder / f"set-{old.number}.json", old)
    first = old.helpers[0]
    keys = tuple(replace(key, not_after=key.not_after + 1) for key in first.hpke_keys)
    new = HelperSet(old.number + 1, (replace(first, hpke_keys=keys), *old.helpers[1:]))
    for party in range(PARTIES):
        new = new.signed_by(load_identity(trio.helper_folder(party) / "identity.key"))
        config = trio.config_path(party)
        stored = json.loads(config.read_text())
        stored["previous_helper_sets"] = [*stored.get("previous_helper_sets", []), f"../set-{old.number}.json"]
        config.write_text(json.dumps(stored))
    write_set(trio.helper_set_path, new)
    return new
