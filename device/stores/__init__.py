"""The state of a device, and where it is stored.

- `storage`: the records, and the interface that both stores implement
- `memory_store`: in memory, for simulation and tests
- `sqlite_store`: in one SQLite file, for a person
- `schema`: how that file is created, validated and upgraded
- `instance`: how a restored or copied file is detected
"""
