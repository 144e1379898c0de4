"""The demonstrations.

- `demo`: one query from people to answer, on the terminal: `trefoil demo`
- `live`: an ad, a shop, three helpers and one noisy answer, in a browser: `trefoil live`
"""
