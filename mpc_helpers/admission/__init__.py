"""Admit: which reports of a batch one helper will count, and their sum.

- `column`: a column on disk as it arrives, the digests of its reports, and blocks of check shares
- `headers`: the rules of a query, checked on the headers of a whole chunk at once
- `chunk`: a span of a column, opened, checked and added up in one job
- `residues`: what this helper computes of every checked report, alone
- `ingest`: a whole column, chunk by chunk
- `executors`: where chunks run: processes of this machine, or a cluster of the operator's
"""
