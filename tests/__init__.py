"""Tests: one file per module. README.md says what each level proves."""
