"""What one helper remembers for good: which reports are spent, and every attempt to spend them.

- `attempt`: an attempt at a query: its name, its states, what may be said about it
- `schema`: the tables, and the rules that SQLite itself enforces on them
- `file`: a ledger as a file: made whole, opened only by its owner
- `database`: the open file: one caller at a time, one transaction for each change
- `chain`: how far this ledger and the peers' have come
- `reports`: which reports are spent, and the attempt that holds each
- `moves`: reserve, vote, release, renounce, free, abort: each in one transaction
- `queries`: the book of queries: what became of each
- `ledger`: all of these, opened together
- `rebuild`: whose a ledger is, and how one that was lost is made again from both peers' entries
"""
