"""Three helpers on this machine, to try Trefoil out: whoever holds all three keys can read every report.

- `launcher`: made once in a directory, started together, stopped together
- `view`: `trefoil launch` as a person sees it
"""
