"""Three parties that draw joint noise in one process, with the clear twin and with parties that cheat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.joint import circuit, noise
from mpc_helpers.mpc.joint.circuit import Circuit, Words
from mpc_helpers.mpc.joint.layout import Layout, PairStreams, Purpose
from mpc_helpers.mpc.joint.noise import JointNoise, Judge, alone
from mpc_helpers.mpc.runtime import Engine, Program, run_three_in_one_process
from mpc_helpers.mpc.session import MpcSession
from protocol.field import Vector, add, lift
from protocol.joint_scale import JointScale

SESSION = b"s" * 32
Components = dict[int, Vector]
Make = Callable[[Engine, Layout, Judge], JointNoise]
STEP = 3


def small() -> Layout:
    """ε = 1, b = 2, and 20 buckets: every message is there, and a run takes some milliseconds."""
    return layout_of(Fraction(1, 2), 2, 20)


def layout_of(rate: Fraction, change: int, buckets: int) -> Layout:
    return Layout(circuit.build(JointScale.of(rate, change)), buckets)


class Run:
    """One session: what became of each party, what was sent, and the noise that these keys make."""

    def __init__(
        self,
        layout: Layout,
        *,
        keys: Mapping[int, bytes] | None = None,
        intercept: Intercept | None = None,
        parties: Mapping[int, Make] | None = None,
        seconds: float = 200.0,
        session: Callable[..., MpcSession] = MpcSession,
    ) -> None:
        self.layout = layout
        self.keys: dict[int, bytes] = dict(keys or {})
        self.frames: list[tuple[int, int, bytes]] = []
        self.sessions = sessions(layout, seconds, session)
        self._intercept = intercept
        self._parties = parties or {}
        programs = [self._program(party) for party in range(3)]
        self.outcomes: Sequence[Components | BaseException] = asyncio.run(
            run_three_in_one_process(self.sessions, programs, self._seen)
        )

    def failures(self, *parties: int) -> list[BaseException]:
        """What went wrong at these parties."""
        outcomes = (self.outcomes[party] for party in parties or (0, 1, 2))
        return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    def components(self, party: int) -> Components:
        outcome = self.outcomes[party]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def opened(self, *parties: int) -> list[int]:
        """The noise as the components of two parties determine it."""
        components: Components = {}
        for party in parties:
            components |= self.components(party)
        return lift(add(add(components[0], components[1]), components[2]))

    def clear(self) -> list[int]:
        """The noise that three honest parties with these keys make, computed in the clear."""
        return clear_noise(self.layout, self.keys, self.sessions[0])

    def steps(self) -> list[tuple[int, int, int]]:
        """Sender, receiver and step of all that was sent."""
        return sorted((sender, receiver, frame[1]) for sender, receiver, frame in self.frames if is_step(frame))

    def _program(self, party: int) -> Program[Components]:
        make = self._parties.get(party, JointNoise)

        async def program(engine: Engine) -> Components:
            for lacking in engine.session.peers:
                low, high = (other for other in range(3) if other != lacking)
                key = self.keys.setdefault(lacking, engine.pair_key(lacking))
                engine._runtime._prss_keys[low, high] = key  # the test's own, where it has one
            return await make(engine, self.layout, alone).draw()

        return program

    def _seen(self, sender: int, receiver: int, frame: bytes) -> bytes | None:
        self.frames.append((sender, receiver, frame))
        return frame if self._intercept is None else self._intercept(sender, receiver, frame)


def is_step(frame: bytes, step: int | None = None) -> bool:
    """Whether it is a step's frame, of this step. A pair key has 16 bytes of any value, and a body a multiple of 8."""
    return frame[:1] == bytes([STEP]) and len(frame) % 8 == 2 and step in (None, frame[1])


def sessions(layout: Layout, seconds: float = 200.0, make: Callable[..., MpcSession] = MpcSession) -> list[MpcSession]:
    return [make(party, SESSION, b"joint", layout.buckets, seconds, layout.message_sizes(party)) for party in range(3)]


def clear_noise(layout: Layout, keys: Mapping[int, bytes], session: MpcSession) -> list[int]:
    bits = np.zeros((layout.circuit.inputs, layout.words), dtype=np.uint64)
    for lacking in range(3):
        stream = PairStreams(keys[lacking], session, lacking).open(Purpose.BITS)
        bits ^= stream.words(layout.circuit.inputs, layout.words)
    planes = evaluate(layout.circuit, bits)
    return lift(noise.own_value(noise.unpacked(layout, planes)))


Change = Callable[[Vector], object]


def cheating(peer_offset: int, step: int, change: Change) -> Make:
    """A party that changes what it sends in one step to the party `peer_offset` after it, and carries on with that."""

    class Cheating(JointNoise):
        def _post(self, peer: int, number: int, words: Vector) -> None:
            if (peer, number) == ((self._party + peer_offset) % 3, step):
                change(words)
            super()._post(peer, number, words)

    return Cheating


Post = Callable[[int, int, bytes], None]


def posting(change: Callable[[Post, int, int, bytes], None]) -> Make:
    """A party whose messages go through `change`, which is given the way to post, peer, step and body."""

    class Posting(JointNoise):
        def __init__(self, engine: Engine, layout: Layout, judge: Judge = alone) -> None:
            super().__init__(engine, layout, judge)
            post = engine.post
            engine.post = lambda peer, step, body: change(post, peer, step, body)  # type: ignore[method-assign]

    return Posting


def evaluate(of: Circuit, bits: Words) -> Words:
    """Evaluate the circuit in the clear, inputs × words to outputs × words."""
    wires = np.empty((of.wires, bits.shape[1]), dtype=np.uint64)
    wires[: of.inputs] = bits
    product, xor = of.inputs, of.inputs + of.gates
    for layer in of.layers:
        wires[product : product + layer.left.size] = wires[layer.left] & wires[layer.right]
        product += layer.left.size
        wires[xor : xor + layer.xor_left.size] = wires[layer.xor_left] ^ wires[layer.xor_right]
        xor += layer.xor_left.size
    return of.outputs(wires, constants=True)
