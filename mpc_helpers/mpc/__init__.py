"""Noise: the one computation that the three helpers run together.

- `session`: who takes part, what a session is bound to, its deadline, and how it fails
- `noise`: exact discrete noise from fair coins
- `joint`: noise drawn by three helpers together, known to none, and proven by each to the other two (JOINT.md)
- `noisy_sum`: its public terms, the program of each kind of noise, and the computation that the three run together
- `failed_proofs`: the alarm of joint noise: a durable count of this helper's failed checks
- `channel`: frames to one peer, the handshake on them, and the two kinds of message that they carry
- `links`: TCP and TLS between the three workers of a session
- `runtime`: MPyC, contained: our channels, codec and deadline
- `worker`: the daemon's side of a worker and of the fork server, which forks it
- `fork_server_main`: both from inside: the fork server, its warm-up, and a worker
"""
