"""Features: encode impressions as vectors of small integers, record which went into a batch, and read the answer.

Column 0 is the intercept, always 1. A category is one-hot over its levels, a number over its bins. The noise of an
answer grows with the largest sum of a vector (`cap`), so with the number of fields, and not with the number of columns.

A publisher records every report: its digest, its features and, where one visitor may have several, a pseudonym. All
of it came from the publisher; nothing is private to a device. `LabelSums` is the answer of `trefoil query --json`.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from protocol.batch import BatchReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import unwritable, write_atomically
from protocol.noise import NoiseMode, law_of
from protocol.querier.regression.model import Design, Matrix, Noise, read_document
from protocol.wire import HASH_SIZE, tagged_hash

FORMAT = 1
MAX_COLUMNS = 4096
_UNIT_DIGITS = 16
_HINT = "Describe every field in the features file, and give every row a value for each of them."


class FieldKind(Enum):
    CATEGORY = "category"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: a category with `levels`, or a number with the `edges` between its bins."""

    name: str
    kind: FieldKind
    levels: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        distinct, ascending = set(self.levels), sorted(set(self.edges))
        if self.kind is FieldKind.CATEGORY:
            fine = len(self.levels) > 1 and len(distinct) == len(self.levels)
        else:
            fine = len(self.edges) > 0 and list(self.edges) == ascending
        if not self.name or not fine:
            raise TrefoilError(
                f"the field {self.name!r} is not a complete {self.kind.value}",
                "A category has two or more levels, a number one or more ascending edges.",
                kind=ErrorKind.MISSING_FIELD,
            )

    @property
    def names(self) -> list[str]:
        """Return the names of the field's columns for people."""
        if self.kind is FieldKind.CATEGORY:
            return [f"{self.name} = {level}" for level in self.levels]
        bounds = [*(f"below {edge:g}" for edge in self.edges), f"from {self.edges[-1]:g}"]
        return [f"{self.name} {bound}" for bound in bounds]

    @property
    def columns(self) -> int:
        return len(self.names)

    def encode(self, value: object) -> list[int]:
        """Return the field's columns for one value: a 1 in the column of its level or bin."""
        if self.kind is FieldKind.NUMBER:
            place = bisect.bisect_right(self.edges, _number(value))
        elif value in self.levels:
            place = self.levels.index(str(value))
        else:
            message = f"{value!r} is not one of its {len(self.levels)} levels"
            raise TrefoilError(message, _HINT, kind=ErrorKind.UNKNOWN_NAME)
        return [int(column == place) for column in range(self.columns)]


@dataclass(frozen=True, slots=True)
class FeatureEncoding:
    """All fields of a model, in the order of their columns."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise TrefoilError(
                "a features file has at least one field, and each name once", _HINT, kind=ErrorKind.DUPLICATE
            )
        if self.columns > MAX_COLUMNS:
            message = f"{self.columns} columns; {MAX_COLUMNS} is the most"
            raise TrefoilError(message, "Use fewer levels or bins.", kind=ErrorKind.TOO_LARGE)

    @property
    def columns(self) -> int:
        """Return the length of a vector, the intercept included."""
        return 1 + sum(field.columns for field in self.fields)

    @property
    def cap(self) -> int:
        """Return the sum of a vector: the query's sensitivity."""
        return 1 + len(self.fields)

    @property
    def unit(self) -> str:
        """Return the encoding's name. It is in every report, so that helpers never add up vectors of two encodings."""
        return f"features {tagged_hash('features', self._canonical()).hex()[:_UNIT_DIGITS]}"

    @property
    def names(self) -> list[str]:
        return ["intercept", *(name for field in self.fields for name in field.names)]

    def encode(self, row: Mapping[str, object], place: str = "the row") -> tuple[int, ...]:
        """Return one impression's vector. `place` names the row in errors."""
        vector = [1]
        for field in self.fields:
            value = _value(row, field.name, place)
            try:
                vector.extend(field.encode(value))
            except TrefoilError as error:
                message = f"{place}, column {field.name!r}: {error}"
                raise TrefoilError(message, error.hint, kind=error.kind) from None
        return tuple(vector)

    def save(self, path: Path) -> None:
        """Write a file that people can read and edit."""
        write_atomically(path, (json.dumps(self._to_json(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> FeatureEncoding:
        stored = read_document(path, "a features file", _HINT)
        if not isinstance(stored, dict) or stored.get("trefoil_features") != FORMAT:
            message = f"{path} is not a features file of format {FORMAT}"
            raise TrefoilError(message, _HINT, kind=ErrorKind.UNKNOWN_VERSION)
        entries = stored.get("fields")
        if not isinstance(entries, list):
            raise TrefoilError("a features file has a list of fields", _HINT, kind=ErrorKind.MALFORMED)
        return cls(tuple(_field(entry) for entry in entries))

    def _to_json(self) -> dict[str, object]:
        return {"trefoil_features": FORMAT, "fields": [_entry(field) for field in self.fields]}

    def _canonical(self) -> bytes:
        return json.dumps(self._to_json(), sort_keys=True, separators=(",", ":")).encode()


def learn_encoding(
    rows: Iterable[Mapping[str, object]], categories: Sequence[str], numbers: Sequence[str], *, bins: int = 4
) -> FeatureEncoding:
    """Return an encoding for the publisher's own rows: every level that occurs, and bins of about equal counts."""
    records = list(rows)
    if not records:
        raise TrefoilError("there are no rows to learn an encoding from", _HINT, kind=ErrorKind.TOO_FEW)
    if not (2 <= bins <= MAX_COLUMNS):
        raise TrefoilError(f"a number is cut into 2 to {MAX_COLUMNS} bins, not {bins}", kind=ErrorKind.OUT_OF_RANGE)
    fields = []
    for name in categories:
        levels = sorted({str(_value(row, name)) for row in records})
        fields.append(Field(name, FieldKind.CATEGORY, levels=tuple(levels)))
    for name in numbers:
        ordered = sorted(_number(_value(row, name)) for row in records)
        cuts = (ordered[len(ordered) * place // bins] for place in range(1, bins))
        fields.append(Field(name, FieldKind.NUMBER, edges=tuple(sorted({cut for cut in cuts if cut > ordered[0]}))))
    return FeatureEncoding(tuple(fields))


def _value(row: Mapping[str, object], name: str, place: str = "a row") -> object:
    if name not in row:
        raise TrefoilError(f"{place} has no {name!r}", _HINT, kind=ErrorKind.MISSING_FIELD)
    return row[name]


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever it is, float says whether it is a number
    except (TypeError, ValueError):
        raise TrefoilError(f"{value!r} is not a number", _HINT, kind=ErrorKind.WRONG_TYPE) from None
    if not (abs(number) < float("inf")):
        raise TrefoilError(f"{value!r} is not a finite number", _HINT, kind=ErrorKind.OUT_OF_RANGE)
    return number


def _entry(field: Field) -> dict[str, object]:
    content = {"levels": list(field.levels)} if field.kind is FieldKind.CATEGORY else {"edges": list(field.edges)}
    return {"name": field.name, "kind": field.kind.value, **content}


def _field(entry: Any) -> Field:
    try:
        name, levels, edges = entry["name"], entry.get("levels", []), entry.get("edges", [])
        kind = FieldKind(entry["kind"])
    except (TypeError, AttributeError, KeyError, ValueError):
        kinds = ", ".join(kind.value for kind in FieldKind)
        hint = f"Give every field a name and a kind: {kinds}."
        raise TrefoilError("a field has no name, or no known kind", hint, kind=ErrorKind.MISSING_FIELD) from None
    if not (isinstance(name, str) and isinstance(levels, list) and isinstance(edges, list)):
        raise TrefoilError(f"the field {name!r} has levels or edges that are no list", _HINT, kind=ErrorKind.WRONG_TYPE)
    return Field(name, kind, tuple(map(str, levels)), tuple(map(_number, edges)))


_RECORDS_HINT = "Keep the records file that trefoil device label wrote beside the batch."


@dataclass(frozen=True, slots=True)
class Record:
    """What a publisher keeps of one report."""

    digest: bytes
    features: tuple[int, ...]
    visitor: str = ""

    def line(self) -> str:
        stored: dict[str, object] = {"report": self.digest.hex(), "features": list(self.features)}
        return json.dumps(stored | ({"visitor": self.visitor} if self.visitor else {}))


def append_record(path: Path, record: Record) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(record.line() + "\n")
    except OSError as error:
        raise unwritable(path, error) from None


def load_records(path: Path, encoding: FeatureEncoding) -> dict[bytes, Record]:
    """Return every record by its report's digest; an error names the row that does not fit `encoding`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise TrefoilError(message, _RECORDS_HINT, kind=ErrorKind.FILE_UNREADABLE) from None
    except UnicodeDecodeError:
        raise TrefoilError(f"{path} is not a text file", _RECORDS_HINT, kind=ErrorKind.WRONG_FILE) from None
    records = (_record(line, f"{path}, row {number}", encoding) for number, line in enumerate(lines, 1))
    return {record.digest: record for record in records}


def join_features(batch: BatchReader, records: dict[bytes, Record]) -> Design:
    """Return the design matrix of all reports in `batch`; a duplicate counts once."""
    digests = {row.tobytes() for row in batch.digests()}
    missing = [digest for digest in digests if digest not in records]
    if missing:
        raise TrefoilError(
            f"{len(missing)} of {len(digests)} reports in {batch.path} have no record, {missing[0].hex()[:16]} first",
            _RECORDS_HINT,
            kind=ErrorKind.INCONSISTENT,
        )
    chosen = [records[digest] for digest in sorted(digests)]
    rows = np.array([record.features for record in chosen], dtype=np.int64)
    return Design(rows, _groups(chosen))


def _groups(records: Sequence[Record]) -> Any:
    """Return one group number per visitor, or None if no record names a visitor."""
    if not any(record.visitor for record in records):
        return None
    named = [record.visitor or record.digest.hex() for record in records]
    return np.unique(np.array(named), return_inverse=True)[1]


def _record(line: str, place: str, encoding: FeatureEncoding) -> Record:
    try:
        stored: Any = json.loads(line)
        digest, visitor = bytes.fromhex(stored["report"]), stored.get("visitor", "")
        features = stored["features"]
        if len(digest) != HASH_SIZE or type(visitor) is not str or not isinstance(features, list):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TrefoilError(f"{place} is not a record", _RECORDS_HINT, kind=ErrorKind.MALFORMED) from None
    return Record(digest, check_vector(features, place, encoding), visitor)


def check_vector(features: Sequence[object], place: str, encoding: FeatureEncoding) -> tuple[int, ...]:
    """Return the vector if it fits `encoding`: non-negative integers, one per column, with a sum of at most the cap."""
    if len(features) != encoding.columns:
        raise TrefoilError(
            f"{place} has {len(features)} features; this encoding has {encoding.columns}",
            "Use the features file that the reports were made with.",
            kind=ErrorKind.INCONSISTENT,
        )
    for name, value in zip(encoding.names, features, strict=True):
        if type(value) is not int or value < 0:
            message = f"{place}, column {name!r}: {value!r} is not an integer of at least 0"
            raise TrefoilError(message, _RECORDS_HINT, kind=ErrorKind.OUT_OF_RANGE)
    numbers = tuple(value for value in features if isinstance(value, int))
    if not 1 <= sum(numbers) <= encoding.cap:
        message = f"{place}: the features add up to {sum(numbers)}, above the cap of {encoding.cap}"
        raise TrefoilError(message, _RECORDS_HINT, kind=ErrorKind.TOO_LARGE)
    return numbers


# Below this fraction of counted reports, the selection of those left out may bias the fit.
LEAST_COUNTED = 0.99
_ANSWER_HINT = "Give the file that trefoil query --json wrote for this batch."


@dataclass(frozen=True, slots=True)
class LabelSums:
    """Σ y·x over the reports that were counted, with the noise in each number."""

    unit: str
    batch_root: bytes
    sums: Matrix
    noise: Noise
    submitted: int
    counted: int

    @classmethod
    def load(cls, path: Path) -> LabelSums:
        stored = read_document(path, "an answer", _ANSWER_HINT)
        try:
            variance, mode = float(stored["noise_variance"]), NoiseMode(stored["noise"])
            loaded = cls(
                unit=stored["unit"],
                batch_root=bytes.fromhex(stored["batch_root"]),
                sums=np.array(stored["answer"], dtype=np.float64),
                noise=Noise(variance, float(law_of(mode).shape)),
                submitted=int(stored["reports_submitted"]),
                counted=int(stored["reports_counted"]),
            )
        except (ValueError, KeyError, TypeError):
            raise TrefoilError(f"{path} is not an answer", _ANSWER_HINT, kind=ErrorKind.MALFORMED) from None
        if loaded.sums.ndim != 1 or not 0 < loaded.counted <= loaded.submitted:
            raise TrefoilError(f"{path} is not an answer", _ANSWER_HINT, kind=ErrorKind.MALFORMED)
        return loaded

    def check(self, unit: str, batch_root: bytes) -> None:
        """Raise an error if the answer is of another batch or encoding, or counts too few reports."""
        if self.batch_root != batch_root:
            hint = "Give the batch that was queried, unchanged."
            raise TrefoilError("this answer is of another batch", hint, kind=ErrorKind.WRONG_FILE)
        if self.unit != unit:
            raise TrefoilError(
                f"this answer is in {self.unit!r}, and the features file is {unit!r}",
                "Use the features file that the reports were made with.",
                kind=ErrorKind.INCONSISTENT,
            )
        if self.counted < LEAST_COUNTED * self.submitted:
            raise TrefoilError(
                f"only {self.counted} of {self.submitted} reports were counted, which is below {LEAST_COUNTED:.0%}",
                "Which ones were left out is not known, so their features cannot be removed. Query a new batch.",
                kind=ErrorKind.TOO_FEW,
            )

    def for_all(self) -> LabelSums:
        """Return the sums extrapolated to all reports submitted.

        Correct if rejection does not depend on the label, as for reports sealed to an old key. A label that a device
        could not pay for is a counted zero, which neither this nor `check` can detect.
        """
        grown = self.submitted / self.counted
        noise = Noise(self.noise.variance * grown**2, self.noise.shape)
        return LabelSums(self.unit, self.batch_root, self.sums * grown, noise, self.submitted, self.submitted)
