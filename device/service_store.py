"""Where a device keeps its aggregation services: a signed helper set under each name, as it was handed in.

Like all of a store, used inside its transaction only. What a row means is the business of `services`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Protocol


class ServiceStore(Protocol):
    """The services of one device."""

    def all(self) -> Mapping[str, bytes]:
        """Every signed set as its file holds it, by name, in the order of names."""
        ...

    def keep(self, name: str, signed_set: bytes) -> None:
        """Hold this set under this name, in place of what stood there."""
        ...

    def remove(self, name: str) -> None: ...


class ServiceList:
    """In memory. What is held is replaced, never changed, so that a store can put it back."""

    def __init__(self) -> None:
        self.held: Mapping[str, bytes] = {}

    def all(self) -> Mapping[str, bytes]:
        return dict(sorted(self.held.items()))

    def keep(self, name: str, signed_set: bytes) -> None:
        self.held = {**self.held, name: signed_set}

    def remove(self, name: str) -> None:
        self.held = {known: signed_set for known, signed_set in self.held.items() if known != name}


class SqlServices:
    """In the device's database, on the connection of its store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self) -> Mapping[str, bytes]:
        return dict(self._connection.execute("SELECT name, signed_set FROM service ORDER BY name"))

    def keep(self, name: str, signed_set: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO service VALUES (?, ?)", (name, signed_set))

    def remove(self, name: str) -> None:
        self._connection.execute("DELETE FROM service WHERE name = ?", (name,))
