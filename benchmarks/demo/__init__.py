"""The demonstration: people, reports, three helpers and one answer: `trefoil demo`.

- `demo`: what happens
- `view`: what a person sees of it
- `command`: `trefoil demo`
"""
