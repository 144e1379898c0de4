"""The collector: receives sealed reports from devices, stores them unread, and exports batches.

- `limits`: which reports a collector accepts and how many; which reports can be in one batch
- `store`: the durable store, one row per report
- `server`: the HTTPS interface, with bounded memory and group commit
- `batches`: list, merge, split and check batches
- `commands`: `trefoil collect` and `trefoil batch`
"""
