"""Check shares made up for tests, and a bad helper that changes what it says in the check between three helpers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.blocks import BLOCK, Block, block_hash, check_root, preimages
from mpc_helpers.admission.verdicts import Verdicts
from mpc_helpers.agreement.messages import Body, Envelope, Shown
from mpc_helpers.agreement.negotiation import AdmittedBatch
from protocol.errors import Rejection
from protocol.field import P, Vector
from tests.support.commit_world import IDENTITIES, KEYS, REALM, AskedQuery, rejected
from tests.support.three_agreements import ThreeAgreements

Mask = npt.NDArray[np.bool_]

RESIDUES = 4
REPORTS = 70
BAD = 66
ASKED = AskedQuery.of(7, range(REPORTS))


@dataclass
class MadeEvidence:
    """What a helper would have computed; `shares` has a row for each report of the batch."""

    shares: Vector
    summed: Mask
    verdicts: Verdicts
    shown: list[int] = field(default_factory=list)
    data: list[bytes] = field(init=False)
    blocks: list[bytes] = field(init=False)
    residues: int = RESIDUES

    def __post_init__(self) -> None:
        self.rebuild(preimages(self.summed, self.shares[self.summed]))

    def rebuild(self, data: list[bytes]) -> None:
        self.data = data
        self.blocks = [block_hash(number, one) for number, one in enumerate(data)]

    @property
    def check_root(self) -> bytes:
        return check_root(self.blocks)

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        self.shown += numbers
        return [self.data[number] for number in numbers]

    def change_row(self, row: int, change: Callable[[Vector], Vector | None]) -> None:
        """A tree that is consistent in itself, with one row changed, or left out where `change` gives nothing."""
        number, place = divmod(row, BLOCK)
        block = Block.parse(self.data[number], RESIDUES)
        shares, opened = block.shares.copy(), block.opened.copy()
        at = int(np.count_nonzero(opened[:place]))
        changed = change(shares[at])
        if changed is None:
            opened[place], shares = False, np.delete(shares, at, axis=0)
        else:
            shares[at] = changed
        data = list(self.data)
        data[number] = preimages(opened, shares)[0]
        self.rebuild(data)


def evidence_of(
    bad: Sequence[int] = (), *, seed: int = 1, unopened: dict[int, list[int]] | None = None
) -> list[MadeEvidence]:
    """Of three helpers, on residues that are zero but in the bad reports."""
    draw = np.random.default_rng(seed)
    secret = np.zeros((REPORTS, RESIDUES), dtype=object)
    secret[list(bad)] = draw.integers(1, P, size=(len(bad), RESIDUES))
    x1, x2 = (draw.integers(0, P, size=(REPORTS, RESIDUES)).astype(object) for _ in range(2))
    x3 = (secret - x1 - x2) % P
    normal = (2 * x1 + x2, -(x2 + 2 * x3), x1 - x3)
    made = []
    for party, shares in enumerate(normal):
        summed = np.ones(REPORTS, dtype=np.bool_)
        summed[(unopened or {}).get(party, [])] = False
        made.append(MadeEvidence((shares % P).astype(np.uint64), summed, Verdicts.none(REPORTS)))
    return made


def batches_of(evidence: Sequence[MadeEvidence]) -> dict[int, AdmittedBatch]:
    """The batch at each helper."""
    made = {}
    for party, one in enumerate(evidence):
        closed = np.flatnonzero(~one.summed).tolist()
        batch = rejected(ASKED.batch(), closed, Rejection.UNOPENABLE) if closed else ASKED.batch()
        made[party] = replace(batch, evidence=one)
    return made


Change = Callable[[int, Body], Body]


def listen(three: ThreeAgreements, liar: int | None = None, change: Change = lambda _, body: body) -> list[Body]:
    """Everything that is said from now on. `change` gets the receiver and what the liar would have said."""
    heard: list[Body] = []

    def carried(source: int, target: int, data: bytes) -> bytes:
        envelope = Envelope.open(data, REALM, source, KEYS[source])
        body = change(target, envelope.body) if source == liar else envelope.body
        heard.append(body)
        return replace(envelope, body=body).seal(REALM, IDENTITIES[source])

    three.carried = carried
    return heard


def shown_bytes(heard: Sequence[Body]) -> int:
    """Bytes of lists and blocks among what was said."""
    return sum(len(part) for body in heard if isinstance(body, Shown) for part in body.content)
