"""Tests: one file per module. README.md beside this says what each level proves."""
