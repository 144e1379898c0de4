"""Records: what a publisher keeps of every report it was given, to know which features went into a batch.

One line of JSON for each report: its digest, the features that were handed in, and where a visitor may come up more
than once, the publisher's own name for it. Nothing here is private to a device: all of it came from the publisher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.regression.design import Design
from protocol.regression.features import FeatureEncoding, FeatureError
from protocol.wire import HASH_SIZE

_HINT = "Keep the records file that trefoil device label wrote beside the batch."


@dataclass(frozen=True, slots=True)
class Record:
    """One report as its publisher knows it."""

    digest: bytes
    features: tuple[int, ...]
    visitor: str = ""

    def line(self) -> str:
        """As one line of the file."""
        stored: dict[str, object] = {"report": self.digest.hex(), "features": list(self.features)}
        return json.dumps(stored | ({"visitor": self.visitor} if self.visitor else {}))


def append_record(path: Path, record: Record) -> None:
    """Add one line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(record.line() + "\n")
    except OSError as error:
        raise TrefoilError(f"cannot write {path}: {error.strerror}") from None


def load_records(path: Path, encoding: FeatureEncoding) -> dict[bytes, Record]:
    """Every record by its report's digest. A row that is not one of `encoding` is refused with its number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", _HINT) from None
    except UnicodeDecodeError:
        raise TrefoilError(f"{path} is not a text file", _HINT) from None
    records = (_record(line, f"{path}, row {number}", encoding) for number, line in enumerate(lines, 1))
    return {record.digest: record for record in records}


def joined(batch: BatchReader, records: dict[bytes, Record]) -> Design:
    """The features of every report in `batch`, in one design; a report that is there twice counts once."""
    digests = {row.tobytes() for row in batch.digests()}
    missing = [digest for digest in digests if digest not in records]
    if missing:
        raise TrefoilError(
            f"{len(missing)} of {len(digests)} reports in {batch.path} have no record, {missing[0].hex()[:16]} first",
            _HINT,
        )
    chosen = [records[digest] for digest in sorted(digests)]
    rows = np.array([record.features for record in chosen], dtype=np.int64)
    return Design(rows, _groups(chosen))


def _groups(records: Sequence[Record]) -> Any:
    """Rows of one visitor in one group; None where nobody has a name."""
    if not any(record.visitor for record in records):
        return None
    named = [record.visitor or record.digest.hex() for record in records]
    return np.unique(np.array(named), return_inverse=True)[1]


def _record(line: str, place: str, encoding: FeatureEncoding) -> Record:
    try:
        stored: Any = json.loads(line)
        digest, visitor = bytes.fromhex(stored["report"]), stored.get("visitor", "")
        features = stored["features"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TrefoilError(f"{place} is not a record", _HINT) from None
    if len(digest) != HASH_SIZE or type(visitor) is not str or not isinstance(features, list):
        raise TrefoilError(f"{place} is not a record", _HINT)
    return Record(digest, check_vector(features, place, encoding), visitor)


def check_vector(features: Sequence[object], place: str, encoding: FeatureEncoding) -> tuple[int, ...]:
    """A vector of `encoding`: so many whole numbers of at least 0, which add up to at most the cap."""
    if len(features) != encoding.columns:
        raise FeatureError(
            f"{place} has {len(features)} features; this encoding has {encoding.columns}",
            "Use the features file that the reports were made with.",
        )
    numbers = []
    for name, value in zip(encoding.names, features, strict=True):
        if type(value) is not int or value < 0:
            raise FeatureError(f"{place}, column {name!r}: {value!r} is not a whole number of at least 0", _HINT)
        numbers.append(value)
    if not 1 <= sum(numbers) <= encoding.cap:
        raise FeatureError(f"{place}: the features add up to {sum(numbers)}, above the cap of {encoding.cap}", _HINT)
    return tuple(numbers)
