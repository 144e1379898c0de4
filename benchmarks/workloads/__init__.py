"""Simulated people and their reports.

- `seeded`: reproducible randomness, for workloads only
- `people`: simulated people on real devices
- `chromium`: Chromium with the extension, and any host behind it
- `reports`: many sealed reports on all cores, dishonest ones among them; `trefoil reports`
"""
