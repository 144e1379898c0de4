"""A helper's ledgers: where they are, whose they are, and how they are made for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.file import Owner
from mpc_helpers.ledger.ledger import ReportLedger


def debug_ledger(config: HelperConfig) -> Path:
    """Debug reports are counted in a ledger of their own."""
    return config.ledger.with_name(f"{config.ledger.stem}-debug{config.ledger.suffix}")


def owners(config: HelperConfig, membership: Membership) -> Sequence[tuple[Path, Owner]]:
    """The helper's ledgers, the real one first, and whose they are."""
    public = membership.identity.public
    return (
        (config.ledger, Owner(membership.party, public)),
        (debug_ledger(config), Owner(membership.party, public, debug=True)),
    )


def create_ledgers(config: HelperConfig, membership: Membership) -> None:
    """Run once, before a helper's first start. A daemon never does it: a ledger that is not there may be lost."""
    for path, owner in owners(config, membership):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        ReportLedger.create(path, owner)
