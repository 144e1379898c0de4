"""Three helpers on this machine, to try Trefoil out: whoever holds all three keys can read every report.

- `launcher`: made once in a directory, started together, stopped together
- `status`: how helpers are, here or elsewhere
- `view`: `trefoil launch` as a person sees it
"""
