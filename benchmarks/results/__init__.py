"""Result files, and the tables that documents quote from them.

- `origin`: the command, commit, machine, seed and date in every result file; how to make all of them again
- `columns`: a heading and a function for each column, on a terminal or in Markdown
- `tables`: render the quoted tables: `trefoil bench results`
"""
