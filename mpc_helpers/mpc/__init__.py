"""Noise: the one computation that the three helpers run together.

- `session`: who takes part, what a session is bound to, its deadline, and how it fails
- `noise`: exact discrete noise from fair coins
- `joint`: noise drawn by three helpers together, known to none, and proven by each to the other two (JOINT.md)
- `terms`: the public terms of a noisy sum, its cost and time bound, and the program of each kind of noise
- `noisy_sum`: the computation itself: add noise to a shared sum, and keep the result shared
- `failed_proofs`: the alarm of joint noise: a durable count of this helper's failed checks
- `channel`: frames to one peer, the handshake on them, and the two kinds of message that they carry
- `links`: TCP and TLS between the three workers of a session
- `runtime`: MPyC, contained: our channels, codec and deadline
- `worker`: the daemon's side of a worker
- `fork_server`: the daemon's side of its fork server
- `fork_server_main`: both from inside: the fork server, its warm-up, and a worker
"""
