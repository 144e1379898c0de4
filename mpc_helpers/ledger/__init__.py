"""One helper's durable state: which reports are spent, every attempt to spend them, and the queries.

- `attempt`: an attempt's id, states, votes and failpoints
- `schema`: the tables, and the rules that the database itself enforces on them
- `engine`: the seam between a ledger and its database
- `sqlite_engine`: the embedded engine: one file, created atomically, opened only by its owner
- `postgres_schema`: the same tables and rules in PostgreSQL, and the fence
- `postgres_engine`: a ledger in PostgreSQL: one writer, lost connections, commits in doubt
- `database`: the open database, its transactions, and the hash chain of its moves
- `reports`: which reports are spent, and the attempt that holds each
- `share_keys`: the keys of stored shares, which are erased with them
- `moves`: reserve, vote, release, renounce, free, abort: each in one transaction
- `ledger`: all of these, opened together; the states of queries
- `rebuild`: create, upgrade, check, export and rebuild a ledger, outside the daemon
"""
