"""Features: how one impression becomes a vector of small whole numbers, the same way for every report of a batch.

Column 0 is the intercept, always 1. A category takes one column for each of its levels, a number one for each of its
bins: exactly one of them is 1. A count takes one column and keeps its value. The noise of an answer grows with the
largest sum of a vector (`cap`), so with the number of fields, and not with the number of columns.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, assert_never

from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.wire import tagged_hash

FORMAT = 1
MAX_COLUMNS = 4096
MAX_COUNT = 1_000
_UNIT_DIGITS = 16
_HINT = "Describe every field in the features file, and give every row a value for each of them."


class FeatureError(TrefoilError):
    """A row or a features file that cannot be used."""


class FieldKind(Enum):
    """What a field holds."""

    CATEGORY = "category"
    NUMBER = "number"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Field:
    """One field. A category has `levels`, a number the `edges` between its bins, a count the `most` it may be."""

    name: str
    kind: FieldKind
    levels: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()
    most: int = 0

    def __post_init__(self) -> None:
        match self.kind:
            case FieldKind.CATEGORY:
                fine = len(self.levels) > 1 and len(set(self.levels)) == len(self.levels)
            case FieldKind.NUMBER:
                fine = len(self.edges) > 0 and list(self.edges) == sorted(set(self.edges))
            case FieldKind.COUNT:
                fine = 0 < self.most <= MAX_COUNT
            case _:
                assert_never(self.kind)
        if not self.name or not fine:
            raise FeatureError(
                f"the field {self.name!r} is not a complete {self.kind.value}",
                "A category has two or more levels, a number one or more ascending edges, a count its largest value.",
            )

    @property
    def columns(self) -> int:
        """How many columns the field takes."""
        match self.kind:
            case FieldKind.CATEGORY:
                return len(self.levels)
            case FieldKind.NUMBER:
                return len(self.edges) + 1
            case FieldKind.COUNT:
                return 1
            case _:
                assert_never(self.kind)

    @property
    def largest(self) -> int:
        """The most the field can add to the sum of a vector."""
        return self.most if self.kind is FieldKind.COUNT else 1

    def encode(self, value: object) -> list[int]:
        """The field's columns for one value."""
        match self.kind:
            case FieldKind.CATEGORY:
                if value not in self.levels:
                    raise FeatureError(f"{value!r} is not one of its {len(self.levels)} levels", _HINT)
                return _one_hot(self.levels.index(str(value)), self.columns)
            case FieldKind.NUMBER:
                return _one_hot(bisect.bisect_right(self.edges, _number(value)), self.columns)
            case FieldKind.COUNT:
                number = _number(value)
                if not (0 <= number <= self.most and number == int(number)):
                    raise FeatureError(f"{value!r} is not a whole number from 0 to {self.most}", _HINT)
                return [int(number)]
            case _:
                assert_never(self.kind)


@dataclass(frozen=True, slots=True)
class FeatureEncoding:
    """All fields of a model, in the order of their columns."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise FeatureError("a features file has at least one field, and each name once", _HINT)
        if self.columns > MAX_COLUMNS:
            raise FeatureError(f"{self.columns} columns; {MAX_COLUMNS} is the most", "Use fewer levels or bins.")

    @property
    def columns(self) -> int:
        """The length of a vector, the intercept included."""
        return 1 + sum(field.columns for field in self.fields)

    @property
    def cap(self) -> int:
        """The largest sum of a vector: the query's sensitivity."""
        return 1 + sum(field.largest for field in self.fields)

    @property
    def unit(self) -> str:
        """Names the encoding in every report, so that helpers never add up vectors of two encodings."""
        return f"features {tagged_hash('features', self._canonical()).hex()[:_UNIT_DIGITS]}"

    @property
    def names(self) -> tuple[str, ...]:
        """What a person calls each column."""
        named = ["intercept"]
        for field in self.fields:
            match field.kind:
                case FieldKind.CATEGORY:
                    named.extend(f"{field.name} = {level}" for level in field.levels)
                case FieldKind.NUMBER:
                    bounds = [*(f"below {edge:g}" for edge in field.edges), f"from {field.edges[-1]:g}"]
                    named.extend(f"{field.name} {bound}" for bound in bounds)
                case FieldKind.COUNT:
                    named.append(field.name)
                case _:
                    assert_never(field.kind)
        return tuple(named)

    def encode(self, row: Mapping[str, object], place: str = "the row") -> tuple[int, ...]:
        """One impression's vector. `place` says in an error which row it is."""
        vector = [1]
        for field in self.fields:
            if field.name not in row:
                raise FeatureError(f"{place} has no {field.name!r}", _HINT)
            try:
                vector.extend(field.encode(row[field.name]))
            except FeatureError as error:
                raise FeatureError(f"{place}, column {field.name!r}: {error}", error.hint) from None
        return tuple(vector)

    def save(self, path: Path) -> None:
        """As a file that people can read and edit."""
        write_atomically(path, (json.dumps(self._to_json(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> FeatureEncoding:
        """The reverse of `save`."""
        try:
            stored = json.loads(path.read_bytes())
        except OSError as error:
            raise FeatureError(f"cannot read {path}: {error.strerror}", _HINT) from None
        except ValueError as error:
            raise FeatureError(f"{path} is not JSON: {error}", _HINT) from None
        return cls.from_json(stored)

    @classmethod
    def from_json(cls, stored: object) -> FeatureEncoding:
        """Checked in full: nothing of the file is taken on trust."""
        if not isinstance(stored, dict) or stored.get("trefoil_features") != FORMAT:
            raise FeatureError(f"this is not a features file of format {FORMAT}", _HINT)
        entries = stored.get("fields")
        if not isinstance(entries, list):
            raise FeatureError("a features file has a list of fields", _HINT)
        return cls(tuple(_field(entry) for entry in entries))

    def _to_json(self) -> dict[str, object]:
        return {"trefoil_features": FORMAT, "fields": [_entry(field) for field in self.fields]}

    def _canonical(self) -> bytes:
        return json.dumps(self._to_json(), sort_keys=True, separators=(",", ":")).encode()


def learn_encoding(
    rows: Iterable[Mapping[str, object]], categories: Sequence[str], numbers: Sequence[str], *, bins: int = 4
) -> FeatureEncoding:
    """An encoding for the publisher's own records: every level that occurs, and bins that hold about equally many."""
    records = list(rows)
    if not records:
        raise FeatureError("there are no rows to learn an encoding from", _HINT)
    if bins < 2:
        raise FeatureError(f"a number is cut into 2 or more bins, not {bins}", _HINT)
    fields = []
    for name in categories:
        levels = sorted({str(_value(row, name)) for row in records})
        fields.append(Field(name, FieldKind.CATEGORY, levels=tuple(levels)))
    for name in numbers:
        ordered = sorted(_number(_value(row, name)) for row in records)
        cuts = (ordered[len(ordered) * place // bins] for place in range(1, bins))
        fields.append(Field(name, FieldKind.NUMBER, edges=tuple(sorted({cut for cut in cuts if cut > ordered[0]}))))
    return FeatureEncoding(tuple(fields))


def _value(row: Mapping[str, object], name: str) -> object:
    if name not in row:
        raise FeatureError(f"a row has no {name!r}", _HINT)
    return row[name]


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever it is, float says whether it is a number
    except (TypeError, ValueError):
        raise FeatureError(f"{value!r} is not a number", _HINT) from None
    if not (abs(number) < float("inf")):
        raise FeatureError(f"{value!r} is not a finite number", _HINT)
    return number


def _one_hot(place: int, size: int) -> list[int]:
    return [int(column == place) for column in range(size)]


def _entry(field: Field) -> dict[str, object]:
    entry: dict[str, object] = {"name": field.name, "kind": field.kind.value}
    match field.kind:
        case FieldKind.CATEGORY:
            entry["levels"] = list(field.levels)
        case FieldKind.NUMBER:
            entry["edges"] = list(field.edges)
        case FieldKind.COUNT:
            entry["most"] = field.most
        case _:
            assert_never(field.kind)
    return entry


def _field(entry: Any) -> Field:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise FeatureError("every field has a name and a kind", _HINT)
    name, most = entry["name"], entry.get("most", 0)
    try:
        kind = FieldKind(entry.get("kind"))
    except ValueError:
        kinds = ", ".join(kind.value for kind in FieldKind)
        raise FeatureError(f"the field {name!r} has an unknown kind", f"Kinds are {kinds}.") from None
    levels, edges = entry.get("levels", []), entry.get("edges", [])
    if not (isinstance(levels, list) and isinstance(edges, list) and type(most) is int):
        raise FeatureError(
            f"the field {name!r} has levels or edges that are no list, or a most that is no number", _HINT
        )
    return Field(name, kind, tuple(map(str, levels)), tuple(map(_number, edges)), most)
