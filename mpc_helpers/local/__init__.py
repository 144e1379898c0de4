"""Helpers from outside: three on one machine, to try Trefoil out, and the health of helpers anywhere.

- `launcher`: three helpers created once in a directory, started and stopped together
- `doctor`: what three helpers show to anyone, and all checks from a querier's or an operator's place
- `view`: the health of helpers, `trefoil doctor` and `trefoil launch`, on the command line
"""
