"""A helper: one of three parties that add reports up without seeing any of them.

- `helper`: what one helper does with a query, on one page: `Helper.answer`
- `identity`: who this helper is: configuration, keys, certificate, place in the helper set
- `admission`: Admit: which reports this helper will count, and their sum
- `ledger`: what this helper remembers for good: spent reports, attempts, queries
- `mpc`: Noise: the one computation that the three helpers run together
- `agreement`: Agree and Spend: what helpers say to each other before an answer is released
- `service`: the helper as a process: HTTPS interface, queries, way to the peers
- `local`: helpers from outside: three on this machine, and how any are
- `commands`: `trefoil helper`, `launch`, `keygen`, `site`, `ledger` and `alarm`

A room imports only itself and rooms before it: identity, then admission, ledger and mpc, then agreement, helper,
service, local. `tests/test_imports.py` checks this.
"""
