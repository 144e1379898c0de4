"""Spans of time. Every time in Trefoil is a whole number of seconds since 1970, UTC."""

from __future__ import annotations

HOUR = 3_600
DAY = 24 * HOUR
