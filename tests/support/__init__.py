"""Harnesses that several tests share."""
