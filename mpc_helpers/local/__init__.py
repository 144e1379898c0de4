"""Helpers from outside: three on one machine, to try Trefoil out, and the health of helpers anywhere.

- `launcher`: three helpers created once in a directory, started and stopped together
- `view`: the health of helpers, and `trefoil launch`, on the command line
"""
