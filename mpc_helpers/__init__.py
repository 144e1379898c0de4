"""A helper: one of three parties that add reports up without seeing any of them.

- `helper`: the phases of one query, in order: `Helper.answer`
- `identity`: a helper's configuration, keys, certificate and position in the helper set
- `admission`: Admit: which reports of a batch one helper will count, and their sum
- `ledger`: one helper's durable state: spent reports, every attempt to spend them, and the queries
- `mpc`: Noise: the one computation that the three helpers run together
- `agreement`: Agree and Spend: the commit protocol between the three helpers (COMMIT.md)
- `service`: the helper as a process: its HTTPS interface, its queries and its connections to the peers
- `local`: three helpers on this machine, to try Trefoil out; the health of helpers anywhere
- `commands`: `trefoil helper`, `launch`, `keygen`, `site`, `ledger` and `alarm`
"""
