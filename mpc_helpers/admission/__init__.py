"""Admit: which reports of a batch one helper will count, and their sum.

- `rules`: what a report must satisfy, and the byte that says what became of it
- `headers`: the headers of a chunk, checked all at once
- `opening`: the two seeds sealed to this helper, checked against the header
- `residues`: what this helper computes of every checked report, alone
- `blocks`: residues in blocks that helpers compare by hash
- `verdicts`: what the three found out about each report's numbers
- `chunk`: a span of a column, opened, checked and added up in one go
- `ingest`: a whole column, chunk by chunk
- `column`: a column as it arrives on disk, and the digests of its reports
- `pool`: processes of this machine that open reports
- `cluster`: or a cluster of machines that the operator runs
- `admit`: all of it, as the helper's page calls it
"""
