"""Joint noise among three parties: the right noise, or none, whatever one of them does.

Cheats are caught but for a chance of at most 2M/(p − 1) = 2^−54 each, so the file fails by chance with probability
below 2^−40, and the test of what a party sees with the probability that it states.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from mpc_helpers.mpc.joint.layout import Layout, PairStreams, Purpose, following, preceding
from mpc_helpers.mpc.joint.noise import JointNoise, commitment_to
from mpc_helpers.mpc.session import MpcError, Stage
from protocol import field
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P, Vector, from_integers
from protocol.shares import LACKING, open_shamir, to_shamir
from tests.support.joint_trio import STEP, Make, Post, Run, cheating, is_step, layout_of, posting, small

SMALL = small()
DONE, ABORT = b"\x01", 2
FULL = bool(os.environ.get("TREFOIL_FUZZ_SECONDS"))


def stopped(run: Run, bad: int) -> None:
    """Assert that no honest party has a result, and that none that detected a fault said that it was done."""
    honest = [party for party in range(3) if party != bad]
    assert len(run.failures(*honest)) == 2, (bad, run.outcomes)
    for party in honest:
        failure = run.outcomes[party]
        if isinstance(failure, MpcError) and failure.stage is Stage.PROOF:
            assert not any(sender == party and frame == DONE for sender, _, frame in run.frames)


def decided(run: Run, prover: int) -> MpcError:
    """The failure of the one party that checks this prover."""
    failure = run.outcomes[following(prover)]
    assert isinstance(failure, MpcError)
    return failure


# The noise.


@pytest.mark.parametrize(
    ("scale", "buckets"),
    [(Fraction(1, 20), 5), (1, 1), (3, 65), (10, 200), (100, 64), (100, 130), (65536, 70), (2**40, 3)],
)
def test_any_two_parties_hold_the_noise_of_the_clear_twin(scale: Fraction | int, buckets: int) -> None:
    run = Run(layout_of(1 / Fraction(scale), max(1, int(scale)), buckets))
    expected = run.clear()
    assert len(expected) == buckets
    assert [run.opened(*pair) for pair in ((0, 1), (1, 2), (0, 2))] == [expected] * 3


def test_the_components_become_shamir_shares_as_those_of_reports_do() -> None:
    run = Run(SMALL)

    def shares() -> list[Vector]:
        parts = (run.components(party) for party in range(3))
        named = ({LACKING[lacking]: part for lacking, part in of.items()} for of in parts)
        return [to_shamir(party, of) for party, of in enumerate(named)]

    assert open_shamir(shares()) == run.clear()
    run.components(1)[0][3] ^= np.uint64(1)
    with pytest.raises(ProtocolError, match="do not fit together"):
        open_shamir(shares())


def test_256_rows_and_several_blocks() -> None:
    """A layout of more than 2^17 words of gates, with a whole run through both verifiers."""
    layout = layout_of(Fraction(1, 100), 100, 28_000)
    assert layout.rows == 256
    run = Run(layout)
    assert run.opened(0, 1) == run.opened(1, 2) == run.clear()


def test_messages_are_those_that_are_announced() -> None:
    run = Run(SMALL)
    assert not run.failures()
    expected = [
        (peer, party, step)
        for party in range(3)
        for peer, steps in SMALL.message_sizes(party).items()
        for step in steps
    ]
    assert run.steps() == sorted(expected) and len(expected) == 3 * (SMALL.circuit.depth + 6)
    sizes = {(sender, receiver, frame[1]): len(frame) - 2 for sender, receiver, frame in run.frames if is_step(frame)}
    for party in range(3):
        for peer, announced in SMALL.message_sizes(party).items():
            assert announced == {step: sizes[peer, party, step] for step in announced}


# Whatever is changed on the way, or sent instead.


def flip(body: bytes) -> bytes:
    """One bit in the middle of a word, so that a number stays a number."""
    at = 8 * (len(body) // 16) + 3
    return body[:at] + bytes([body[at] ^ 16]) + body[at + 1 :]


def plus_one(body: bytes, at: int) -> bytes:
    number = (int.from_bytes(body[at : at + 8], "little") + 1) % P
    return body[:at] + number.to_bytes(8, "little") + body[at + 8 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": flip,
    "random": lambda body: bytes(byte & 0x1F for byte in os.urandom(8)) + body[8:],
    "zeros": lambda body: bytes(len(body)),
    "first plus one": lambda body: plus_one(body, 0),
    "last plus one": lambda body: plus_one(body, len(body) - 8),
    "a byte less": lambda body: body[:-1],
    "a byte more": lambda body: body + b"\0",
    "all ones": lambda body: b"\xff" * len(body),
}
MESSAGES = [
    (peer, party, step) for party in range(3) for peer, steps in SMALL.message_sizes(party).items() for step in steps
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_message_changed_in_every_way_stops_the_session(change: str) -> None:
    for message in MESSAGES:

        def intercept(sender: int, receiver: int, frame: bytes, message: tuple[int, int, int] = message) -> bytes:
            if is_step(frame) and (sender, receiver, frame[1]) == message:
                return frame[:2] + CHANGES[change](frame[2:])
            return frame

        stopped(Run(SMALL, intercept=intercept), message[0])


@pytest.mark.parametrize("message", MESSAGES if FULL else MESSAGES[::3])
def test_a_step_that_comes_twice_or_in_another_s_place_names_the_sender(message: tuple[int, int, int]) -> None:
    sender, receiver, step = message

    def twice(post: Post, peer: int, number: int, body: bytes) -> None:
        for _ in range(2 if (peer, number) == (receiver, step) else 1):
            post(peer, number, body)

    def misplaced(post: Post, peer: int, number: int, body: bytes) -> None:
        post(peer, number + int((peer, number) == (receiver, step)), body)

    for change in (twice, misplaced):
        run = Run(SMALL, parties={sender: posting(change)})
        stopped(run, sender)
        failure = run.outcomes[receiver]
        assert isinstance(failure, MpcError) and failure.party == sender
        assert failure.kind in (ErrorKind.INCONSISTENT, ErrorKind.TRAILING_BYTES, ErrorKind.TOO_LARGE)


# A party that computes wrongly and carries on with it consistently.


def one_bit(words: Vector) -> None:
    words[0, 0] ^= np.uint64(1 << 5)


def all_bits(words: Vector) -> None:
    words ^= np.uint64(2**64 - 1)


def unused_lane(words: Vector) -> None:
    words[-1, -1] ^= np.uint64(1 << 63)


@pytest.mark.parametrize("change", [one_bit, all_bits, unused_lane])
@pytest.mark.parametrize("bad", range(3))
def test_a_wrong_gate_in_any_layer_is_found_by_the_proof(bad: int, change: Callable[[Vector], None]) -> None:
    for layer in range(1, SMALL.circuit.depth + 1):
        run = Run(SMALL, parties={bad: cheating(1, layer, change)})
        stopped(run, bad)
        assert decided(run, bad).stage is Stage.PROOF


def test_a_bit_worth_two_to_the_forty_is_found() -> None:
    """Attack A: the dealer multiplies what it deals of one digit, so that the answer shows that digit."""

    def scaled(numbers: Vector) -> None:
        numbers[:, -1] = field.multiply_constant(numbers[:, -1], 2**40)

    stopped(Run(SMALL, parties={2: cheating(1, SMALL.dealing, scaled)}), 2)


def test_two_to_the_thirty_added_to_a_converted_bit_is_found() -> None:
    """Attack B: the answer would spell the bits that the dealer does not know."""

    def shifted(numbers: Vector) -> None:
        numbers[:, 0] = field.add(numbers[:, 0], from_integers([2**30]))

    def cancelling(numbers: Vector) -> None:
        numbers[:2, 0] = field.add(numbers[:2, 0], from_integers([1, -1]))

    for change in (shifted, cancelling):
        run = Run(SMALL, parties={2: cheating(1, SMALL.dealing, change)})
        stopped(run, 2)
        assert decided(run, 2).stage is Stage.PROOF


@pytest.mark.parametrize(("bad", "step"), [(0, SMALL.turning), (1, SMALL.dealing)])
def test_a_shifted_answer_is_found(bad: int, step: int) -> None:
    def shifted(numbers: Vector) -> None:
        numbers[3:4] = field.add(numbers[3:4], from_integers([1000]))

    def cancelling(numbers: Vector) -> None:
        numbers[:2] = field.add(numbers[:2], from_integers([5, -5]))

    for change in (shifted, cancelling):
        run = Run(SMALL, parties={bad: cheating(1, step, change)})
        stopped(run, bad)
        assert decided(run, bad).stage is Stage.PROOF


@pytest.mark.parametrize("bad", range(3))
def test_a_lying_left_verifier_only_stops_the_session(bad: int) -> None:
    """Without the mask ν it would learn an output bit from whether its lie is accepted."""
    for place in np.random.default_rng(bad).integers(0, SMALL.folded, size=20).tolist():

        def lie(numbers: Vector, place: int = place) -> None:
            numbers[[place, -1]] = field.add(numbers[[place, -1]], from_integers([1, 1]))

        run = Run(SMALL, parties={bad: cheating(2, SMALL.proving, lie)})
        stopped(run, bad)
        assert decided(run, following(bad)).stage is Stage.PROOF


def test_a_cheater_that_is_given_the_point_passes() -> None:
    """The control: the secret point is what stops the cheats above."""
    bad = 1
    keys = {lacking: os.urandom(16) for lacking in range(3)}
    point = PairStreams(keys[bad], Run(SMALL).sessions[0], bad).open(Purpose.POINT).nonzero()
    place = SMALL.rows - 1  # of the coefficient of X: as many stand before it, and that of X^0 is not sent

    class Knowing(JointNoise):
        def _post(self, peer: int, step: int, words: Vector) -> None:
            if step == SMALL.circuit.depth:
                words[-1, 0] ^= np.uint64(1)
            if (peer, step) == (following(bad), SMALL.proving):
                # The wrong gate takes 2 from the constant term; 2/t at exponent 1 makes up for it at t.
                missing = from_integers([-2 * pow(point, -1, P)])
                words[place : place + 1] = field.add(words[place : place + 1], missing)
            super()._post(peer, step, words)

    run = Run(SMALL, keys=keys, parties={bad: Knowing})
    assert not run.failures(0, 2)
    assert run.opened(0, 2) != run.clear()


# The rules that make it safe: SPEC §11, J1 to J7.


def last_message(prover: int) -> int:
    """The last step whose message the proof weighs."""
    return SMALL.turning if prover == 0 else SMALL.dealing


@pytest.mark.parametrize("prover", range(3))
def test_j1_a_prover_that_holds_back_its_last_message_never_gets_its_weights(prover: int) -> None:
    def held_back(sender: int, receiver: int, frame: bytes) -> bytes | None:
        return None if is_step(frame, last_message(prover)) and sender == prover else frame

    run = Run(SMALL, intercept=held_back, seconds=0.3)
    stopped(run, prover)
    verifier = following(prover)
    assert (verifier, prover, SMALL.opening) not in run.steps()
    # The other verifier knows the seed too; it sends no opening to this prover in any session.
    assert (preceding(prover), prover, SMALL.opening) not in run.steps()


@pytest.mark.parametrize("prover", range(3))
def test_j1_nor_does_one_whose_last_message_does_not_decode(prover: int) -> None:
    def too_large(sender: int, receiver: int, frame: bytes) -> bytes:
        of_prover = is_step(frame, last_message(prover)) and sender == prover
        return frame[:-8] + P.to_bytes(8, "little") if of_prover else frame

    run = Run(SMALL, intercept=too_large)
    stopped(run, prover)
    assert (following(prover), prover, SMALL.opening) not in run.steps()


@pytest.mark.parametrize("bad", range(3))
def test_j1_control_one_that_knows_its_weights_one_message_early_passes(bad: int) -> None:
    """Why the rule is there: with ρ, errors can be chosen that cancel."""
    keys = {lacking: os.urandom(16) for lacking in range(3)}

    class Knowing(JointNoise):
        def _post(self, peer: int, step: int, words: Vector) -> None:
            if step == last_message(bad) and peer == self._after:
                seed = PairStreams(keys[bad], self._engine.session, bad).open(Purpose.WEIGHTS).take(32)
                weights = self._weights(bad, seed).reshape(-1)
                errors = field.multiply(weights[[1, 0]], from_integers([1, -1]))
                flat = words.reshape(-1)
                flat[:2] = field.add(flat[:2], errors)
            super()._post(peer, step, words)

    run = Run(SMALL, keys=keys, parties={bad: Knowing})
    honest = [party for party in range(3) if party != bad]
    assert not run.failures(*honest)
    assert run.opened(*honest) != run.clear()


def other_weights(bad: int, *, opening_only: bool) -> Make:
    """A right verifier that opens weights of its own to the one before it, and may have committed to them."""
    seed = os.urandom(32)

    def change(post: Post, peer: int, step: int, body: bytes) -> None:
        if peer == preceding(bad) and step == 0 and not opening_only:
            body = commitment_to(seed)
        if peer == preceding(bad) and step == SMALL.opening:
            body = seed
        post(peer, step, body)

    return posting(change)


@pytest.mark.parametrize("opening_only", [False, True])
@pytest.mark.parametrize("bad", range(3))
def test_j2_a_prover_with_other_weights_than_the_third_party_s_proves_nothing(bad: int, opening_only: bool) -> None:
    """From the difference of two weighings a bad right verifier would learn a bucket's noise."""
    prover = preceding(bad)
    run = Run(SMALL, parties={bad: other_weights(bad, opening_only=opening_only)})
    stopped(run, bad)
    failure = run.outcomes[prover]
    assert isinstance(failure, MpcError)
    assert failure.kind is (ErrorKind.BAD_PROOF if opening_only else ErrorKind.INCONSISTENT)
    assert failure.party == (bad if opening_only else None)
    assert (prover, bad, SMALL.proving) not in run.steps()


def test_j3_the_point_is_never_sent() -> None:
    run = Run(SMALL)
    for prover in range(3):
        point = PairStreams(run.keys[prover], run.sessions[0], prover).open(Purpose.POINT).nonzero()
        assert not any(point.to_bytes(8, "little") in frame for _, _, frame in run.frames)


@pytest.mark.parametrize("bad", range(3))
def test_j4_nobody_is_done_before_its_own_check(bad: int) -> None:
    """The one who checks the cheater has no result and does not say that it is done; so the third has none either."""
    run = Run(SMALL, parties={bad: cheating(1, 1, one_bit)})
    checker, third = following(bad), preceding(bad)
    assert not any(sender == checker and frame == DONE for sender, _, frame in run.frames)
    assert any(sender == checker and frame[0] == ABORT for sender, _, frame in run.frames)
    assert isinstance(run.outcomes[third], MpcError)


@pytest.mark.parametrize("step", [0, 1, SMALL.circuit.depth, SMALL.dealing, SMALL.proving])
def test_j4_done_with_a_step_missing_is_a_failure(step: int) -> None:
    bad = 2

    def early(sender: int, receiver: int, frame: bytes) -> bytes:
        return DONE if sender == bad and receiver == 0 and is_step(frame, step) else frame

    failure = Run(SMALL, intercept=early).outcomes[0]
    assert isinstance(failure, MpcError) and failure.party == bad
    assert "finished without sending its part" in str(failure)


def other_kinds() -> Iterator[bytes]:
    """A vector and bytes as MPyC sends them, an unknown kind, nothing at all, and a step of no session."""
    yield bytes([0]) + bytes(8) + bytes([1, 0, 0, 0, 160]) + bytes(160)
    yield bytes([0]) + bytes(8) + bytes([2, 0, 0, 0, 1, 7])
    yield bytes([4]) + bytes(20)
    yield b""
    yield bytes([STEP, 200]) + bytes(32)


@pytest.mark.parametrize("other", list(other_kinds()))
def test_j5_frames_of_other_kinds_end_the_session_and_name_the_sender(other: bytes) -> None:
    def instead(sender: int, receiver: int, frame: bytes) -> bytes:
        return other if (sender, receiver) == (1, 2) and is_step(frame, 2) else frame

    run = Run(SMALL, intercept=instead)
    stopped(run, 1)
    failure = run.outcomes[2]
    assert isinstance(failure, MpcError) and failure.party == 1


@pytest.mark.parametrize("other", list(other_kinds()))
def test_j5_nor_may_they_come_beside_the_steps(other: bytes) -> None:
    """Every step is there as well, so that only the frame itself can be what ends the session."""

    class Talkative(JointNoise):
        def _post(self, peer: int, step: int, words: Vector) -> None:
            if step == 2:
                self._engine._exchangers[peer]._channel.send(other)
            super()._post(peer, step, words)

    run = Run(SMALL, parties={1: Talkative})
    stopped(run, 1)
    failure = run.outcomes[2]
    assert isinstance(failure, MpcError) and failure.party == 1


def test_j5_a_longer_frame_is_refused_unread() -> None:
    def longer(sender: int, receiver: int, frame: bytes) -> bytes:
        return frame + bytes(2**20) if (sender, receiver) == (1, 2) and is_step(frame, 2) else frame

    failure = Run(SMALL, intercept=longer).outcomes[2]
    assert isinstance(failure, MpcError) and failure.party == 1 and failure.kind is ErrorKind.TOO_LARGE


def test_j6_every_session_has_new_keys_and_other_noise() -> None:
    first, second = Run(SMALL), Run(SMALL)
    assert not set(first.keys.values()) & set(second.keys.values())
    assert first.clear() != second.clear()  # equal by chance once in about 2^40
    # The same keys in another session make other noise too.
    third = Run(layout_of(Fraction(1, 2), 2, 21), keys=first.keys)
    assert third.clear()[:20] != first.clear()


@pytest.mark.parametrize("prover", range(3))
def test_j7_elements_not_below_p_are_refused_and_name_the_sender(prover: int) -> None:
    for offset, step in ((1, last_message(prover)), (1, SMALL.proving), (2, SMALL.proving)):
        receiver = (prover + offset) % 3
        for at in (2, -8):

            def too_large(
                sender: int, target: int, frame: bytes, route: tuple[int, int, int] = (receiver, step, at)
            ) -> bytes:
                if sender != prover or target != route[0] or not is_step(frame, route[1]):
                    return frame
                start = route[2] % len(frame)
                return frame[:start] + P.to_bytes(8, "little") + frame[start + 8 :]

            run = Run(SMALL, intercept=too_large)
            stopped(run, prover)
            failure = run.outcomes[receiver]
            assert isinstance(failure, MpcError) and failure.party == prover and "not below p" in str(failure)


# What a party sees.


def test_what_a_party_receives_says_nothing_about_the_noise() -> None:
    """Two pair keys fixed, as the party knows them, and the third fresh in every run: every bit it receives is a fair
    coin, alone and added to a bit of the noise. So one who stops before its vote, to have the noise drawn again, does
    not know what it throws away.

    A coin that is fair is off by more than z standard deviations with probability at most 2·exp(−z²/2) (Hoeffding):
    10^−6 over all bits that are looked at.
    """
    layout, runs = layout_of(Fraction(2), 1, 5), 400 if FULL else 80
    fixed = {lacking: os.urandom(16) for lacking in range(3)}
    for victim in range(3):
        counts: list[Vector] = []
        for _ in range(runs):
            run = Run(layout, keys=fixed | {victim: os.urandom(16)})
            received = sorted((sender, frame) for sender, to, frame in run.frames if to == victim and is_step(frame))
            data = np.frombuffer(b"".join(frame[2:] for _, frame in received), dtype=np.uint8)
            bits = np.unpackbits(data, bitorder="little")
            noise = run.clear()
            counts.append(np.stack([bits, *(bits ^ np.uint8(digit) for digit in (noise[0] & 1, int(noise[0] < 0)))]))
        ones = np.add.reduce(np.array(counts), axis=0, dtype=np.int64)
        # The three highest bits of a number below 2^61 are zero, and nothing else is constant.
        constant = (ones[0] == 0) | (ones[0] == runs)
        assert constant.tolist() == [bit for of in received for bit in top_bits(layout, of[1])]
        scores = np.abs(ones - runs / 2)[:, ~constant] / np.sqrt(runs / 4)
        assert float(scores.max()) ** 2 / 2 < np.log(2 * 3 * scores.size * 1e6)


def top_bits(layout: Layout, frame: bytes) -> list[bool]:
    """For every bit of a message: whether it is one of the three highest of a number."""
    numbers = frame[1] > layout.circuit.depth and frame[1] != layout.opening
    return [numbers and at % 64 >= 61 for at in range(8 * (len(frame) - 2))]
