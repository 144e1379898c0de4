"""The collector: takes sealed reports from devices, files them without reading them, and hands out batches.

- `kind`: which reports can be in one batch
- `limits`: what a collector takes, and how much of it
- `store`: the reports on disk, each exactly once
- `intake`: one report after the other, many in one transaction
- `bodies`: posts on their way into memory, bounded all together
- `server`: the HTTPS interface
- `batches`: batches listed, merged, split and checked
- `commands`: `trefoil collect` and `trefoil batch`
"""
