"""The command line that all roles share.

- `app`: the table of commands, exit codes, and how a failure is reported
- `console`: output: lines, tables, progress, JSON files, figures
- `options`: option types that commands share, and checks of output paths
- `stopping`: SIGINT and SIGTERM
- `commands`: `trefoil helper-set`
"""
