"""Joint noise as one party runs it: `JointNoise.draw` is the whole of its part.

Parties are numbered 0, 1, 2 and stand in a ring. Component l of a secret is known to all but party l. Everything a
party sends goes to the one after it, which checks the proof that all of it was right; the one before it helps to check.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpc_helpers.mpc.joint import conversion, proof
from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.conversion import Value
from mpc_helpers.mpc.joint.layout import DEALER, Layout, following, preceding
from mpc_helpers.mpc.joint.streams import SEED_SIZE, PairStreams, Purpose, Stream, words_from
from mpc_helpers.mpc.session import MpcError, Stage, name_of
from protocol import field
from protocol.errors import ProtocolError
from protocol.field import P, Vector
from protocol.wire import tagged_hash

if TYPE_CHECKING:
    from mpc_helpers.mpc.runtime import Engine


Judge = Callable[[Callable[[], bool], str], bool]


def alone(holds: Callable[[], bool], _: str) -> bool:
    """A check that nobody counts, as tests want it. A worker's are counted (`failed_proofs`)."""
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
    """One party of one session. Nothing in it is used for another. `judge` runs its check of another's proof."""

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
        """*Commit · Draw · Convert · Challenge · Prove · Check.* Gives the two components of the noise held here.

        Nothing is opened among the three, so a party that stops here, and makes them draw again, does so blindly.
        """
        # Commit: to the weights of both others' proofs, before either has sent anything that is weighed.
        seeds = self._commit()
        # Draw: the coins, gate by gate, from bits of which every party lacks a third.
        gates, outputs = await self._draw()
        # Convert: bits to numbers.
        held = await self._convert(outputs)
        # Challenge: the one before has sent all it ever will, and learns what weighs it.
        weights = await self._challenge(seeds)
        # Prove: all that was sent here, to the two others.
        self._prove(gates, held, weights)
        self._vouch(gates, held, seeds)
        # Check: that of the one before. No result without it.
        await self._check(gates, held, seeds)
        return conversion.components(self._party, held)

    # Commit.

    def _commit(self) -> dict[int, bytes]:
        """The seeds of both others' weights, each known to this party and the third."""
        seeds = {}
        for prover in (self._after, self._before):
            seeds[prover] = self._streams[prover].open(Purpose.WEIGHTS).take(SEED_SIZE)
            self._engine.post(prover, 0, commitment_to(seeds[prover]))
        return seeds

    async def _take_commitments(self) -> None:
        """Two verifiers that hold different weights could learn a bucket from the difference of their sums."""
        first, second = [await self._engine.take(peer, 0) for peer in (self._after, self._before)]
        if not hmac.compare_digest(first, second):
            raise MpcError(Stage.COMPUTE, "the two others committed to different weights for our proof")
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
        # The constants of the coins go into component 0.
        outputs = {
            lacking: circuit.outputs(wires[place], constants=lacking == 0)
            for place, lacking in enumerate((self._after, self._before))
        }
        return Gates(left, right, masks, wires[:, circuit.inputs : circuit.inputs + circuit.gates]), outputs

    async def _take_words(self, step: int, gates: int) -> Words:
        return words_from(await self._engine.take(self._before, step), gates)

    # Convert.

    async def _convert(self, outputs: dict[int, Words]) -> dict[Value, Vector]:
        """What this party holds of the conversion in the end; the three parts differ (`conversion`)."""
        bits = {lacking: conversion.unpacked(self._layout, planes) for lacking, planes in outputs.items()}
        if self._party == DEALER:
            return await self._convert_as_dealer(bits[0], bits[1])
        if self._party == following(DEALER):
            return await self._convert_as_receiver(bits[1], bits[2])
        return await self._convert_as_splitter(bits[0], bits[2])

    async def _convert_as_dealer(self, bits_0: Vector, bits_1: Vector) -> dict[Value, Vector]:
        layout = self._layout
        dealt_0 = self._elements(0, Purpose.DEALT, layout.numbers).reshape(bits_0.shape)
        dealt_1 = conversion.deal(bits_0, bits_1, dealt_0)
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
        turned_2 = conversion.turn(bits_2, dealt_1, turned_1)
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
        split_0 = conversion.turn(bits_2, dealt_0, split_2)
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
        """Release the weights of the one before, and take our own.

        By now every message that is weighed is here and decoded (SPEC §11, J1): one that knew its weights a message
        early could send errors that cancel.
        """
        self._engine.post(self._before, self._layout.opening, seeds[self._before])
        seed = await self._engine.take(self._after, self._layout.opening)
        if not hmac.compare_digest(commitment_to(seed), self._commitment):
            message = f"{name_of(self._after)} opened other weights than both others had committed to"
            raise MpcError(Stage.COMPUTE, message, party=self._after)
        return self._weights(self._party, seed)

    # Prove.

    def _prove(self, gates: Gates, held: dict[Value, Vector], weights: Vector) -> None:
        """As prover: the coefficients, less the share of them that the left verifier draws itself."""
        layout = self._layout
        found = proof.coefficients(
            left_half(layout, gates, 0, conversion.left_numbers(self._party, weights, held)),
            right_half(layout, gates, 1, conversion.right_numbers(self._party, weights, held)),
            self._elements(self._after, Purpose.LEFT_MASK, layout.folded),
            self._elements(self._before, Purpose.RIGHT_MASK, layout.folded),
        )
        shared = self._elements(self._after, Purpose.COEFFICIENTS, layout.coefficients)
        self._post(self._after, layout.proving, field.subtract(found, shared))

    def _vouch(self, gates: Gates, held: dict[Value, Vector], seeds: dict[int, bytes]) -> None:
        """As left verifier of the one after us: its left half at the secret point, and one number."""
        layout, prover = self._layout, self._after
        point, weights = self._point(prover), self._weights(prover, seeds[prover])
        half = left_half(layout, gates, 1, conversion.left_numbers(prover, weights, held))
        folded = proof.fold_left(half, self._elements(self._before, Purpose.LEFT_MASK, layout.folded), point)
        shared = self._elements(self._before, Purpose.COEFFICIENTS, layout.coefficients)
        rest = proof.evaluate(shared, layout.rows, point) + conversion.left_total(prover, weights, held)
        self._post(self._before, layout.proving, np.append(folded, np.uint64(rest % P)))

    # Check.

    async def _check(self, gates: Gates, held: dict[Value, Vector], seeds: dict[int, bytes]) -> None:
        """As right verifier of the one before us."""
        layout, prover = self._layout, self._before
        point, weights = self._point(prover), self._weights(prover, seeds[prover])
        half = right_half(layout, gates, 0, conversion.right_numbers(prover, weights, held))
        own = proof.fold_right(half, self._elements(self._after, Purpose.RIGHT_MASK, layout.folded), point)
        found = await self._take_numbers(prover, layout.proving, layout.coefficients)
        theirs = await self._take_numbers(self._after, layout.proving, layout.folded + 1)
        claimed = proof.evaluate(found, layout.rows, point) + int(theirs[-1])
        claimed += conversion.right_total(prover, weights, held) + layout.lifted_gates
        # All that it needs is here: what follows waits for nobody, so one check at a time is no bottleneck.
        names = f"the proof of {name_of(prover)}, or {name_of(self._after)}'s part of it,"
        about = f"{names} in attempt {self._engine.session.attempt_id.hex()[:16]}"
        if not self._judge(lambda: int(field.dot(theirs[:-1], own)) == claimed % P, about):
            raise MpcError(
                Stage.PROOF,
                f"{names} does not hold: one of them computed something else than it should",
                hint="Nothing was released. This never happens among honest helpers: ask both operators.",
            )

    # What all of them need.

    def _elements(self, lacking: int, purpose: Purpose, count: int) -> Vector:
        return self._streams[lacking].open(purpose).elements(count)

    def _point(self, prover: int) -> int:
        """Known to the two verifiers and never sent to anyone (SPEC §11, J3)."""
        return self._streams[prover].open(Purpose.POINT).nonzero()

    def _weights(self, prover: int, seed: bytes) -> Vector:
        return conversion.weights_for(prover, self._layout, Stream(tagged_hash("joint noise: rho", seed)))

    def _post(self, peer: int, step: int, words: Words) -> None:
        """Words of gates or field elements: both are eight little-endian bytes each."""
        self._engine.post(peer, step, field.encode(words))

    async def _take_numbers(self, peer: int, step: int, count: int) -> Vector:
        body = await self._engine.take(peer, step)
        try:
            return field.decode(body, count)
        except ProtocolError as error:
            raise MpcError(Stage.COMPUTE, f"{name_of(peer)} sent {error}", party=peer) from None


def commitment_to(seed: bytes) -> bytes:
    """What a prover gets of its weights before it has sent everything."""
    return tagged_hash("joint noise: weights", seed)


def products(left: Words, right: Words, masks: Words) -> Words:
    """r_i = x_(i+1)·(y_(i+1) ⊕ y_(i+2)) ⊕ x_(i+2)·y_(i+1) ⊕ F_(i+1) ⊕ F_(i+2): component i + 2 of the product."""
    found: Words = left[0] & (right[0] ^ right[1])
    found ^= left[1] & right[0]
    found ^= masks[0]
    found ^= masks[1]
    return found


def left_half(layout: Layout, gates: Gates, place: int, numbers: Vector) -> proof.Half:
    """a = x, c = y, s_L = ac ⊕ F, of the component that a prover shares with its left verifier."""
    a, c = gates.left[place], gates.right[place]
    return proof.Half.of(layout, a, c, (a & c) ^ gates.masks[place], numbers)


def right_half(layout: Layout, gates: Gates, place: int, numbers: Vector) -> proof.Half:
    """b = y, d = x, s_R = F ⊕ r, of the component that a prover shares with its right verifier."""
    b, d = gates.right[place], gates.left[place]
    return proof.Half.of(layout, b, d, gates.masks[place] ^ gates.products[place], numbers)
