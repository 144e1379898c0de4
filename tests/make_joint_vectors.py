"""Writes tests/vectors/joint.json. Run after a change of SPEC §11: python -m tests.make_joint_vectors

Everything follows from the inputs that the file names. The parameter digest is given, because it covers the version of
MPyC; messages of more than 64 bytes are there as their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from typing import Any

from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.streams import PairStreams, Purpose
from mpc_helpers.mpc.session import MpcSession
from protocol.joint_scale import JointScale
from tests.make_vectors import FOLDER
from tests.support.joint_trio import SESSION, Run, is_step

SCALES = [
    (Fraction(64), 1),
    (Fraction(16), 4),
    (Fraction(3, 2), 4),
    (Fraction(1, 2), 2),
    (Fraction(1, 100), 100),
    (Fraction(1, 100), 380),
    (Fraction(999_983, 12_345_000_000), 7),
    (Fraction(1, 65536), 65536),
    (Fraction(1, 2**40), 2**40),
]
DRAWN = (Fraction(16), 4, 70)
PAIR_KEYS = {lacking: bytes([lacking]) * 16 for lacking in range(3)}
DIGEST = b"p" * 32


class VectorSession(MpcSession):
    """With a parameter digest that does not depend on what is installed."""

    @property
    def parameter_digest(self) -> bytes:
        return DIGEST


def parameters_vector(rate: Fraction, change: int) -> dict[str, Any]:
    scale = JointScale.of(rate, change)
    return {
        "rate": str(rate),
        "change": change,
        "covered": scale.change,
        "coins": [[coin.bits, coin.numerator] for coin in scale.coins],
        "delta": str(scale.delta()),
        "variance": str(scale.variance),
        "half_width_95": scale.half_width(Fraction(19, 20)),
        "encoding": scale.encode().hex(),
    }


def circuit_vector(rate: Fraction, change: int) -> dict[str, Any]:
    """Wires: inputs, then gates, then XORs."""
    built = circuit.build(JointScale.of(rate, change))
    return {
        "rate": str(rate),
        "change": change,
        "inputs": built.inputs,
        "gates": [[layer.left.tolist(), layer.right.tolist()] for layer in built.layers],
        "xors": [[layer.xor_left.tolist(), layer.xor_right.tolist()] for layer in built.layers],
        "roots": built.roots.tolist(),
        "constants": list(built.constants),
    }


def streams_vector() -> list[dict[str, Any]]:
    session = VectorSession(0, SESSION, b"", 1, 1.0)
    return [
        {
            "purpose": purpose.value,
            "lacking": lacking,
            "bytes": PairStreams(PAIR_KEYS[lacking], session, lacking).open(purpose).take(16).hex(),
            "elements": PairStreams(PAIR_KEYS[lacking], session, lacking).open(purpose).elements(2).tolist(),
        }
        for purpose in Purpose
        for lacking in range(3)
    ]


def session_vector() -> dict[str, Any]:
    rate, change, numbers = DRAWN
    layout = Layout(circuit.build(JointScale.of(rate, change)), numbers)
    run = Run(layout, keys=PAIR_KEYS, session=VectorSession)
    messages = sorted((sender, to, frame[1], frame[2:]) for sender, to, frame in run.frames if is_step(frame))
    return {
        "rate": str(rate),
        "change": change,
        "numbers": numbers,
        "rows": layout.rows,
        "columns": layout.columns,
        "folded": layout.folded,
        "messages": [
            {"from": sender, "to": to, "step": step, "size": len(body), "body": _shown(body)}
            for sender, to, step, body in messages
        ],
        "components": [
            {str(lacking): component.tolist() for lacking, component in run.components(party).items()}
            for party in range(3)
        ],
        "noise": run.clear(),
    }


def _shown(body: bytes) -> str:
    return body.hex() if len(body) <= 64 else "sha256 " + hashlib.sha256(body).hexdigest()


def joint_file() -> dict[str, Any]:
    return {
        "about": "SPEC §11. Attempt id, parameter digest and pair keys are inputs of streams and session.",
        "attempt_id": SESSION.hex(),
        "parameter_digest": DIGEST.hex(),
        "pair_keys": {str(lacking): key.hex() for lacking, key in PAIR_KEYS.items()},
        "parameters": [parameters_vector(*terms) for terms in SCALES],
        "circuit": circuit_vector(*DRAWN[:2]),
        "streams": streams_vector(),
        "session": session_vector(),
    }


def main() -> None:
    (FOLDER / "joint.json").write_text(json.dumps(joint_file(), indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
