"""What the parts of one helper's agreement share."""

from __future__ import annotations

from dataclasses import dataclass

from mpc_helpers.agreement.hooks import Hooks, Offload, Pace
from mpc_helpers.agreement.negotiations import Negotiations
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.agreement.peers import Alarms, Peers
from mpc_helpers.ledger.ledger import ReportLedger


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Made by `Agreement`, once, and handed to each part."""

    ledger: ReportLedger
    parties: Parties
    peers: Peers
    alarms: Alarms
    negotiations: Negotiations
    # For the ledger's calls, and for computing check shares again.
    offload: Offload
    compute: Offload
    pace: Pace
    hooks: Hooks
