"""Result files, and the tables that documents quote from them.

- `origin`: the command, commit, machine, seed and date in every result file; how to make all of them again
- `tables`: render the quoted tables: `trefoil bench results`
"""
