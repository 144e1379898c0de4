"""What one helper remembers for good: which reports are spent, and every attempt to spend them.

- `attempt`: an attempt at a query: its name, its states, what may be said about it
- `schema`: the tables, and the rules that SQLite itself enforces on them
- `file`: a ledger as a file: made whole, opened only by its owner
- `ledger`: reserve, vote, release, abort, each in one transaction
- `queries`: the book of queries: what became of each
- `rebuild`: whose a ledger is, and how one that was lost is made again from both peers' entries
"""
