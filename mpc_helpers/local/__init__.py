"""Helpers from outside: three on this machine, to try Trefoil out, and how helpers anywhere are.

Whoever holds all three keys, as `launcher` does, can read every report.

- `launcher`: made once in a directory, started together, stopped together
- `status`: how helpers are, here or elsewhere
- `view`: `trefoil launch` as a person sees it
"""
