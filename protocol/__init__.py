"""The language all roles share: numbers, reports, queries and their bytes. Specified in SPEC.md."""
