"""Joint noise as one party runs it: `JointNoise.draw` is its whole program.

Parties are numbered 0, 1, 2 and stand in a ring. Component l of a secret is known to all but party l. Everything a
party sends goes to the next party, its right verifier, which checks a proof that all of it was correct; the previous
party, its left verifier, helps to check.

The output is converted from shared bits to shared numbers, which is proven too. An output bit is
o = o₀ ⊕ o₁ ⊕ o₂, component l known to all but party l. Party 2 deals (o₀ ⊕ o₁) as e0 + e1. With
w = (1, 2, …, 2^(L−1), −2^L) and φ_j = w_j·(1 − 2·o₂,j), a bucket's noise is

    X = Σ_j w_j·o_j = Σ_j w_j·o₂,j + Σ_j φ_j·e0_j + Σ_j φ_j·e1_j = Σ_j w_j·o₂,j + (b0 + b2) + (a1 + a2)

where party 1, who knows φ and e0, splits the second sum, and party 0, who knows φ and e1, the third. So component 0
of X is b0, component 1 is a1, and component 2 is Σ_j w_j·o₂,j + a2 + b2.

Each prover proves one relation, a random combination with weights ρ: the inner product of numbers that its left
verifier knows and numbers that its right verifier knows equals the sum of one total known to each.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from mpc_helpers.mpc.joint import proof
from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.layout import (
    DEALER,
    SEED_SIZE,
    Layout,
    PairStreams,
    Purpose,
    Stream,
    following,
    preceding,
    words_from,
)
from mpc_helpers.mpc.session import MpcError, Stage, name_of
from protocol import field
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P, Vector, add, dot, reduce, subtract, total
from protocol.wire import tagged_hash

if TYPE_CHECKING:
    from mpc_helpers.mpc.runtime import Engine

_P = np.uint64(P)
_FIELD_BITS = np.uint64(61)
_ONE = np.uint64(1)


class Value(Enum):
    """What a party may hold of a conversion: bits and dealt numbers buckets × (L + 1), the others one per bucket."""

    BITS_0 = auto()
    BITS_1 = auto()
    BITS_2 = auto()
    DEALT_0 = auto()  # e0, drawn by parties 1 and 2
    DEALT_1 = auto()  # e1, sent by 2 to 0
    TURNED_1 = auto()  # a1, drawn by parties 0 and 2
    TURNED_2 = auto()  # a2, sent by 0 to 1
    SPLIT_2 = auto()  # b2, drawn by parties 0 and 1
    SPLIT_0 = auto()  # b0, sent by 1 to 2


Held = Mapping[Value, Vector]


def unpacked(layout: Layout, planes: Words) -> Vector:
    """Return output bits as numbers 0 and 1, buckets × (L + 1)."""
    raw = np.ascontiguousarray(planes.astype("<u8", copy=False)).view(np.uint8)
    bits = np.unpackbits(raw, axis=1, count=layout.buckets, bitorder="little")
    return bits.T.astype(np.uint64)


def deal(bits_0: Vector, bits_1: Vector, dealt_0: Vector) -> Vector:
    """Return e1 = (o₀ ⊕ o₁) − e0. Run by party 2."""
    return subtract(bits_0 ^ bits_1, dealt_0)


def turn(bits_2: Vector, dealt: Vector, drawn: Vector) -> Vector:
    """Return Σ_j φ_j·e_j − `drawn`: the component that the sum still lacks. Run by parties 0 and 1."""
    return subtract(total(signed_places(bits_2, dealt)), drawn)


def signed_places(bits_2: Vector, values: Vector) -> Vector:
    """Return φ_j·v_j. Multiplying by 2^j modulo 2^61 − 1 is a rotation of 61 bits."""
    places = np.arange(bits_2.shape[1], dtype=np.uint64)
    rotated = (values << places & _P) | values >> (_FIELD_BITS - places)
    # φ is negative for a set bit, and the other way round in the last place, whose weight is −2^L.
    negative = bits_2.astype(bool)
    negative[:, -1] ^= True
    return reduce(np.where(negative, _P - rotated, rotated))


def own_value(bits_2: Vector) -> Vector:
    """Return Σ_j w_j·o₂,j. Its absolute value is below 2^53, so 64-bit integers are exact."""
    weights = 1 << np.arange(bits_2.shape[1], dtype=np.int64)
    weights[-1] *= -1
    return np.mod(bits_2.astype(np.int64) @ weights, P).astype(np.uint64)


def components(party: int, held: Held) -> dict[int, Vector]:
    """Return a party's two components of the noise, by the party that lacks each."""
    parts: dict[int, Vector] = {}
    if party != 0:
        parts[0] = held[Value.SPLIT_0]
    if party != 1:
        parts[1] = held[Value.TURNED_1]
    if party != DEALER:
        parts[2] = add(add(own_value(held[Value.BITS_2]), held[Value.TURNED_2]), held[Value.SPLIT_2])
    return parts


def weights_for(prover: int, layout: Layout, stream: Stream) -> Vector:
    """Return the weights ρ: for the dealer one per number, else one per bucket, as a column that broadcasts."""
    if prover == DEALER:
        return stream.elements(layout.numbers).reshape(layout.buckets, layout.bits)
    return stream.elements(layout.buckets).reshape(layout.buckets, 1)


def left_numbers(prover: int, weights: Vector, held: Held) -> Vector:
    """Return the left factor of the inner product. Run by a prover and its left verifier.

    The relations are, for prover 2, e0 + e1 = o₀ + o₁ − 2·o₀·o₁ in every bit; for prover 0, a1 + a2 = Σ_j φ_j·e1_j in
    every bucket; for prover 1, b0 + b2 = Σ_j φ_j·e0_j in every bucket.
    """
    if prover == DEALER:
        return _selected(held[Value.BITS_0], _doubled(weights))
    if prover == following(DEALER):
        return held[Value.DEALT_1]
    return signed_places(held[Value.BITS_2], weights)


def right_numbers(prover: int, weights: Vector, held: Held) -> Vector:
    """Return the right factor of the inner product. Run by a prover and its right verifier."""
    if prover == DEALER:
        return held[Value.BITS_1]
    if prover == following(DEALER):
        return signed_places(held[Value.BITS_2], weights)
    return held[Value.DEALT_0]


def left_total(prover: int, weights: Vector, held: Held) -> int:
    """Return the left part of the claimed total. Run by the left verifier."""
    if prover == DEALER:
        return _weighed(weights, subtract(held[Value.BITS_0], held[Value.DEALT_0]))
    return _weighed(weights, held[Value.TURNED_1 if prover == following(DEALER) else Value.SPLIT_2])


def right_total(prover: int, weights: Vector, held: Held) -> int:
    """Return the right part of the claimed total. Run by the right verifier."""
    if prover == DEALER:
        return _weighed(weights, subtract(held[Value.BITS_1], held[Value.DEALT_1]))
    return _weighed(weights, held[Value.TURNED_2 if prover == following(DEALER) else Value.SPLIT_0])


def _selected(bits: Vector, values: Vector) -> Vector:
    return np.where(bits.astype(bool), values, np.uint64(0))


def _doubled(values: Vector) -> Vector:
    return reduce(values << _ONE)


def _weighed(weights: Vector, values: Vector) -> int:
    return int(dot(weights.reshape(-1), values.reshape(-1)))


Judge = Callable[[Callable[[], bool], str], bool]


def alone(holds: Callable[[], bool], _: str) -> bool:
    """Run a check without recording a failure, for tests. A worker records it: `FailedProofs.judge`."""
    return holds()


@dataclass(frozen=True, slots=True)
class Gates:
    """All gates of a party: operands, masks and products, gates × words, of the two components it holds.

    In each pair, component `after` (which the next party lacks) is first, component `before` second.
    """

    left: Words
    right: Words
    masks: Words
    products: Words


class JointNoise:
    """One party in one session, never reused. `judge` runs this party's check of the previous party's proof."""

    def __init__(self, engine: Engine, layout: Layout, judge: Judge = alone) -> None:
        self._engine = engine
        self._judge = judge
        self._layout = layout
        self._party = engine.party
        self._after = following(engine.party)
        self._before = preceding(engine.party)
        self._streams = {
            lacking: PairStreams(engine.pair_key(lacking), engine.session, lacking)
            for lacking in (self._after, self._before)
        }
        self._commitment = b""

    async def draw(self) -> dict[int, Vector]:
        """*Commit · Draw · Convert · Challenge · Prove · Check.* Return this party's two components of the noise.

        Nothing is opened among the three, so a party that aborts to force another draw knows nothing of this one.
        """
        # Commit: to the weights of both peers' proofs, before either has sent anything that they apply to.
        seeds = self._commit()
        # Draw: the coins, gate by gate, from bits of which every party lacks one of three components.
        gates, outputs = await self._draw()
        # Convert: shared bits to shared numbers.
        held = await self._convert(outputs)
        # Challenge: open the previous party's weights, now that it has sent everything they apply to.
        weights = await self._challenge(seeds)
        # Prove: everything that this party sent, to both peers; and help to check the next party's proof.
        self._prove(gates, held, weights)
        self._vouch(gates, held, seeds)
        # Check: the previous party's proof. No result is used without it.
        await self._check(gates, held, seeds)
        return components(self._party, held)

    # Commit.

    def _commit(self) -> dict[int, bytes]:
        """Send both peers a commitment to their weights. Return the seeds, each also known to the third party."""
        seeds = {}
        for prover in (self._after, self._before):
            seeds[prover] = self._streams[prover].open(Purpose.WEIGHTS).take(SEED_SIZE)
            self._engine.post(prover, 0, commitment_to(seeds[prover]))
        return seeds

    async def _take_commitments(self) -> None:
        """Require equal commitments: verifiers with different weights could learn a bucket's noise (SPEC §11, J2)."""
        first, second = [await self._engine.take(peer, 0) for peer in (self._after, self._before)]
        if not hmac.compare_digest(first, second):
            raise MpcError(
                Stage.COMPUTE,
                "the two others committed to different weights for our proof",
                kind=ErrorKind.INCONSISTENT,
            )
        self._commitment = first

    # Draw.

    async def _draw(self) -> tuple[Gates, dict[int, Words]]:
        circuit, words = self._layout.circuit, self._layout.words
        wires = np.empty((2, circuit.wires, words), dtype=np.uint64)
        masks = np.empty((2, circuit.gates, words), dtype=np.uint64)
        for place, lacking in enumerate((self._after, self._before)):
            wires[place, : circuit.inputs] = self._streams[lacking].open(Purpose.BITS).words(circuit.inputs, words)
            masks[place] = self._streams[lacking].open(Purpose.AND).words(circuit.gates, words)
        left, right = np.empty_like(masks), np.empty_like(masks)
        done, xor = 0, circuit.inputs + circuit.gates
        for step, layer in enumerate(circuit.layers, start=1):
            now = slice(done, done + layer.left.size)
            left[:, now], right[:, now] = wires[:, layer.left], wires[:, layer.right]
            mine = products(left[:, now], right[:, now], masks[:, now])
            self._post(self._after, step, mine)
            if step == 1:
                await self._take_commitments()
            theirs = await self._take_words(step, mine.shape[0])
            done = now.stop
            wires[0, circuit.inputs + now.start : circuit.inputs + now.stop] = theirs
            wires[1, circuit.inputs + now.start : circuit.inputs + now.stop] = mine
            wires[:, xor : xor + layer.xor_left.size] = wires[:, layer.xor_left] ^ wires[:, layer.xor_right]
            xor += layer.xor_left.size
        # Into component 0 only: added in two components, the constants would cancel.
        outputs = {
            lacking: circuit.outputs(wires[place], constants=lacking == 0)
            for place, lacking in enumerate((self._after, self._before))
        }
        return Gates(left, right, masks, wires[:, circuit.inputs : circuit.inputs + circuit.gates]), outputs

    async def _take_words(self, step: int, gates: int) -> Words:
        return words_from(await self._engine.take(self._before, step), gates)

    # Convert.

    async def _convert(self, outputs: dict[int, Words]) -> dict[Value, Vector]:
        """Run this party's part of the conversion, which differs by party, and return everything it then holds."""
        bits = {lacking: unpacked(self._layout, planes) for lacking, planes in outputs.items()}
        if self._party == DEALER:
            return await self._convert_as_dealer(bits[0], bits[1])
        if self._party == following(DEALER):
            return await self._convert_as_receiver(bits[1], bits[2])
        return await self._convert_as_splitter(bits[0], bits[2])

    async def _convert_as_dealer(self, bits_0: Vector, bits_1: Vector) -> dict[Value, Vector]:
        layout = self._layout
        dealt_0 = self._elements(0, Purpose.DEALT, layout.numbers).reshape(bits_0.shape)
        dealt_1 = deal(bits_0, bits_1, dealt_0)
        self._post(0, layout.dealing, dealt_1)
        return {
            Value.BITS_0: bits_0,
            Value.BITS_1: bits_1,
            Value.DEALT_0: dealt_0,
            Value.DEALT_1: dealt_1,
            Value.TURNED_1: self._elements(1, Purpose.TURNED, layout.buckets),
            Value.SPLIT_0: await self._take_numbers(1, layout.dealing, layout.buckets),
        }

    async def _convert_as_receiver(self, bits_1: Vector, bits_2: Vector) -> dict[Value, Vector]:
        layout = self._layout
        turned_1 = self._elements(1, Purpose.TURNED, layout.buckets)
        dealt_1 = (await self._take_numbers(2, layout.dealing, layout.numbers)).reshape(bits_1.shape)
        turned_2 = turn(bits_2, dealt_1, turned_1)
        self._post(1, layout.turning, turned_2)
        return {
            Value.BITS_1: bits_1,
            Value.BITS_2: bits_2,
            Value.DEALT_1: dealt_1,
            Value.TURNED_1: turned_1,
            Value.TURNED_2: turned_2,
            Value.SPLIT_2: self._elements(2, Purpose.TURNED, layout.buckets),
        }

    async def _convert_as_splitter(self, bits_0: Vector, bits_2: Vector) -> dict[Value, Vector]:
        layout = self._layout
        dealt_0 = self._elements(0, Purpose.DEALT, layout.numbers).reshape(bits_0.shape)
        split_2 = self._elements(2, Purpose.TURNED, layout.buckets)
        split_0 = turn(bits_2, dealt_0, split_2)
        self._post(2, layout.dealing, split_0)
        return {
            Value.BITS_0: bits_0,
            Value.BITS_2: bits_2,
            Value.DEALT_0: dealt_0,
            Value.SPLIT_2: split_2,
            Value.SPLIT_0: split_0,
            Value.TURNED_2: await self._take_numbers(0, layout.turning, layout.buckets),
        }

    # Challenge.

    async def _challenge(self, seeds: dict[int, bytes]) -> Vector:
        """Open the previous party's weights, and return our own.

        Every message that they apply to has arrived and is decoded (SPEC §11, J1): a prover that knew its weights one
        message earlier could send errors that cancel.
        """
        self._engine.post(self._before, self._layout.opening, seeds[self._before])
        seed = await self._engine.take(self._after, self._layout.opening)
        if not hmac.compare_digest(commitment_to(seed), self._commitment):
            message = f"{name_of(self._after)} opened other weights than both others had committed to"
            raise MpcError(Stage.COMPUTE, message, party=self._after, kind=ErrorKind.BAD_PROOF)
        return self._weights(self._party, seed)

    # Prove.

    def _prove(self, gates: Gates, held: dict[Value, Vector], weights: Vector) -> None:
        """Send the coefficients, as prover, minus the share of them that the left verifier derives itself."""
        layout = self._layout
        coefficients = proof.coefficients(
            left_half(layout, gates, 0, left_numbers(self._party, weights, held)),
            right_half(layout, gates, 1, right_numbers(self._party, weights, held)),
            self._elements(self._after, Purpose.LEFT_MASK, layout.folded),
            self._elements(self._before, Purpose.RIGHT_MASK, layout.folded),
        )
        shared = self._elements(self._after, Purpose.COEFFICIENTS, layout.coefficients)
        self._post(self._after, layout.proving, field.subtract(coefficients, shared))

    def _vouch(self, gates: Gates, held: dict[Value, Vector], seeds: dict[int, bytes]) -> None:
        """Send the folded left half and the left part of the claimed value, as left verifier of the next party."""
        layout, prover = self._layout, self._after
        point, weights = self._point(prover), self._weights(prover, seeds[prover])
        half = left_half(layout, gates, 1, left_numbers(prover, weights, held))
        folded = proof.fold_left(half, self._elements(self._before, Purpose.LEFT_MASK, layout.folded), point)
        shared = self._elements(self._before, Purpose.COEFFICIENTS, layout.coefficients)
        rest = proof.evaluate(shared, layout.rows, point) + left_total(prover, weights, held)
        self._post(self._before, layout.proving, np.append(folded, np.uint64(rest % P)))

    # Check.

    async def _check(self, gates: Gates, held: dict[Value, Vector], seeds: dict[int, bytes]) -> None:
        """Check the previous party's proof, as its right verifier. Raise `MpcError` if it fails."""
        layout, prover = self._layout, self._before
        point, weights = self._point(prover), self._weights(prover, seeds[prover])
        half = right_half(layout, gates, 0, right_numbers(prover, weights, held))
        own = proof.fold_right(half, self._elements(self._after, Purpose.RIGHT_MASK, layout.folded), point)
        coefficients = await self._take_numbers(prover, layout.proving, layout.coefficients)
        theirs = await self._take_numbers(self._after, layout.proving, layout.folded + 1)
        claimed = proof.evaluate(coefficients, layout.rows, point) + int(theirs[-1])
        claimed += right_total(prover, weights, held) + layout.lifted_gates
        # Nothing below waits for a peer: `judge` serialises checks, and a wait inside would let a peer block them all.
        names = f"the proof of {name_of(prover)}, or {name_of(self._after)}'s part of it,"
        about = f"{names} in attempt {self._engine.session.attempt_id.hex()[:16]}"
        if not self._judge(lambda: int(field.dot(theirs[:-1], own)) == claimed % P, about):
            raise MpcError(
                Stage.PROOF,
                f"{names} does not hold: one of them computed something else than it should",
                hint="Nothing was released. This never happens among honest helpers: ask both operators.",
            )

    # Used by several phases.

    def _elements(self, lacking: int, purpose: Purpose, count: int) -> Vector:
        return self._streams[lacking].open(purpose).elements(count)

    def _point(self, prover: int) -> int:
        """Return the secret point t, known to the two verifiers and never sent (SPEC §11, J3)."""
        return self._streams[prover].open(Purpose.POINT).nonzero()

    def _weights(self, prover: int, seed: bytes) -> Vector:
        return weights_for(prover, self._layout, Stream(tagged_hash("joint noise: rho", seed)))

    def _post(self, peer: int, step: int, words: Words) -> None:
        """Send words of gates or field elements: both are encoded as eight little-endian bytes each."""
        self._engine.post(peer, step, field.encode(words))

    async def _take_numbers(self, peer: int, step: int, count: int) -> Vector:
        body = await self._engine.take(peer, step)
        try:
            return field.decode(body, count)
        except ProtocolError as error:
            raise MpcError(Stage.COMPUTE, f"{name_of(peer)} sent {error}", party=peer, kind=error.kind) from None


def commitment_to(seed: bytes) -> bytes:
    """Return the commitment to a seed of weights, which a prover gets before the seed is opened to it."""
    return tagged_hash("joint noise: weights", seed)


def products(left: Words, right: Words, masks: Words) -> Words:
    """Return component i + 2 of the product, for party i (Araki et al., CCS 2016).

    r_i = x_(i+1)·(y_(i+1) ⊕ y_(i+2)) ⊕ x_(i+2)·y_(i+1) ⊕ F_(i+1) ⊕ F_(i+2)
    """
    products: Words = left[0] & (right[0] ^ right[1])
    products ^= left[1] & right[0]
    products ^= masks[0]
    products ^= masks[1]
    return products


def left_half(layout: Layout, gates: Gates, place: int, numbers: Vector) -> proof.Half:
    """Return the half a = x, c = y, s_L = ac ⊕ F, of the component that prover and left verifier share."""
    a, c = gates.left[place], gates.right[place]
    return proof.Half.of(layout, a, c, (a & c) ^ gates.masks[place], numbers)


def right_half(layout: Layout, gates: Gates, place: int, numbers: Vector) -> proof.Half:
    """Return the half b = y, d = x, s_R = F ⊕ r, of the component that prover and right verifier share."""
    b, d = gates.right[place], gates.left[place]
    return proof.Half.of(layout, b, d, gates.masks[place] ^ gates.products[place], numbers)
