"""Noise: the one computation that the three helpers run together.

- `session`: who takes part, what a session is bound to, by when it ends, how it fails
- `noise`: exact discrete noise from fair coins
- `pace`: how long drawing it is given
- `joint`: noise that three parties draw together and prove to each other
- `sum_program`: every kind of noise, with all that helpers must know of it
- `terms`: what is added to a sum, what it costs, and what the three must agree on about it
- `failed_proofs`: the alarm of joint noise: own checks that failed, on disk
- `noisy_sum`: the program: add noise to a shared sum, and keep the result shared
- `runtime`: MPyC inside a shell of our own
- `steps`: messages of announced size
- `codec`: what parties say inside the computation: field vectors and short bytes
- `channel`: frames over a byte stream to one peer, and the first words on it
- `links`: TCP and TLS between the three workers of a session
- `worker`: a worker as its daemon sees it
- `worker_main`: a worker from inside
- `rehearsal`: sessions without secrets, so that no worker is the first to run one
- `fork_server`: where workers come from
- `fork_server_main`: the fork server from inside
"""
