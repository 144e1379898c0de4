"""Reading tables: the real data sets, for those who have them (PATCG's Parquet files, Criteo's log), and one's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import criteo, patcg
from benchmarks.experiments.world import EventTables, Floats, Ints
from protocol.cli.console import not_installed
from protocol.errors import ErrorKind, TrefoilError

# The Criteo Sponsored Search Conversion Log, in the order of its columns; the file has no header.
CRITEO_COLUMNS = (
    *("Sale", "SalesAmountInEuro", "Time_delay_for_conversion", "click_timestamp", "nb_clicks_1week"),
    *("product_price", "product_age_group", "device_type", "audience_id", "product_gender", "product_brand"),
    *(f"product_category{i}" for i in range(1, 8)),
    *("product_country", "product_id", "product_title", "partner_id", "user_id"),
)
_MISSING = ["", "-1", "-1.0"]
_NUMBERS = ("Sale", "SalesAmountInEuro", "Time_delay_for_conversion", "click_timestamp", "product_price")
_NAMES = ("product_category3", "product_id", "partner_id", "user_id")

Table = object
Names = Mapping[str, str]


def read_tables(
    impressions: Table, conversions: Table, seen_names: Names, done_names: Names, cap: float | None, unit: int
) -> EventTables:
    """Read two tables, whose columns may have other names than ours. Larger values than `cap` are cut to it.

    Values are in units, of which `unit` make 1.
    """
    seen = _columns(impressions, "impressions", ("person", "time"), ("advertiser",), seen_names)
    done = _columns(conversions, "conversions", ("person", "time"), ("advertiser", "product", "value"), done_names)
    if ("advertiser" in seen) != ("advertiser" in done):
        raise TrefoilError(
            "one table has advertisers and the other has none",
            "Give both an advertiser column, or neither.",
            kind=ErrorKind.MISSING_FIELD,
        )
    person, seen_person = _codes("person", done["person"], seen["person"])
    if len(person) == 0:
        raise TrefoilError("the conversions have no rows", "Give a table with some.", kind=ErrorKind.TOO_FEW)
    nobody, unseen = np.zeros(len(person), dtype=np.int64), np.zeros(len(seen_person), dtype=np.int64)
    advertiser, seen_advertiser = nobody, unseen
    if "advertiser" in done:
        advertiser, seen_advertiser = _codes("advertiser", done["advertiser"], seen["advertiser"])
    value = _floats(done["value"], "the column value") if "value" in done else np.ones(len(person))
    if not np.all(value >= 0):
        raise TrefoilError(
            "a conversion has a negative or missing value", "Values are 0 or more.", kind=ErrorKind.OUT_OF_RANGE
        )
    return EventTables(
        seen_person,
        _times(seen["time"]),
        seen_advertiser,
        person,
        _times(done["time"]),
        advertiser,
        _codes("product", done["product"])[0] if "product" in done else nobody,
        np.rint((value if cap is None else np.minimum(value, cap)) * unit).astype(np.int64),
    )


def read_patcg(impressions: Path, conversions: Path) -> EventTables:
    """Read PATCG's exposures and conversions, each a parquet file or a folder of them."""
    seen = {"person": "device_id", "time": "exp_timestamp"}
    done = {"person": "device_id", "time": "conv_timestamp", "product": "conv_attribute_2", "value": "conv_amount"}
    return read_tables(impressions, conversions, seen, done, patcg.CAP, patcg.UNIT)


def read_criteo(path: Path) -> EventTables:
    """Read Criteo's log. Rows without partner, user or product are dropped; a missing price or amount counts as 1."""
    table = _criteo_table(path)
    numbers = {name: _floats(table[name], str(path), optional=True) for name in _NUMBERS}
    codes = {name: _encode(table[name]) for name in _NAMES}
    kept = (codes["partner_id"] >= 0) & (codes["user_id"] >= 0) & (codes["product_id"] >= 0)
    kept &= np.isfinite(numbers["click_timestamp"])
    sold = np.flatnonzero(kept & (numbers["Sale"] == 1))
    if len(sold) == 0:
        raise TrefoilError(
            f"{path} has no sale with partner, user and product",
            "Is it the Criteo log, tab-separated?",
            kind=ErrorKind.TOO_FEW,
        )
    rows = np.flatnonzero(kept)
    clicked = np.nan_to_num(numbers["click_timestamp"]).astype(np.int64)
    delay = np.nan_to_num(numbers["Time_delay_for_conversion"]).astype(np.int64)
    return EventTables(
        seen_person=codes["user_id"][rows],
        seen_advertiser=codes["partner_id"][rows],
        seen_time=clicked[rows],
        person=codes["user_id"][sold],
        advertiser=codes["partner_id"][sold],
        product=codes["product_category3"][sold],
        time=clicked[sold] + np.maximum(0, delay[sold]),
        value=criteo.UNIT * pieces(numbers["SalesAmountInEuro"][sold], numbers["product_price"][sold]),
    )


def pieces(amount: Floats, price: Floats) -> Ints:
    """Return min(5, max(1, amount // price)), and 1 where either is missing."""
    valid = np.isfinite(amount) & np.isfinite(price) & (price > 0)
    whole = np.where(valid, amount, 1.0) // np.where(valid, price, 1.0)
    counted: Ints = np.clip(whole, 1, criteo.CAP).astype(np.int64)
    return counted


def _parquet(path: Path, wanted: Collection[str]) -> tuple[list[str], Any]:
    """Return all names of columns in a parquet file, or in all of a folder, and a table of the wanted columns."""
    import pyarrow.dataset as dataset

    files = sorted([*path.glob("*.pqt"), *path.glob("*.parquet")]) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise TrefoilError(
            f"no parquet file at {path}",
            "Give a .parquet or .pqt file, or the folder that holds them.",
            kind=ErrorKind.FILE_MISSING,
        )
    with _reading(path, "parquet", "Give a .parquet or .pqt file with these columns."):
        whole = dataset.dataset([str(file) for file in files], format="parquet")
        names = list(whole.schema.names)
        return names, whole.to_table(columns=[name for name in names if name in wanted])


@contextmanager
def _reading(path: Path, what: str, hint: str, kind: ErrorKind = ErrorKind.FILE_UNREADABLE) -> Iterator[None]:
    """Say what is wrong with a file that pyarrow cannot read."""
    import pyarrow as arrow

    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise TrefoilError(f"{path} could not be read as {what}: {_first_line(error)}", hint, kind=kind) from error


def _criteo_table(path: Path) -> Any:
    import pyarrow as arrow
    import pyarrow.csv as csv

    if not path.is_file():
        raise TrefoilError(
            f"no file at {path}", "Give the unpacked CriteoSearchData file.", kind=ErrorKind.FILE_MISSING
        )
    types = {name: arrow.float64() for name in _NUMBERS} | {name: arrow.string() for name in _NAMES}
    hint = f"It has {len(CRITEO_COLUMNS)} tab-separated columns and no header."
    with _reading(path, "the Criteo log", hint, ErrorKind.WRONG_FILE):
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=CRITEO_COLUMNS),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=csv.ConvertOptions(
                include_columns=list(types),
                column_types=types,
                null_values=_MISSING,
                strings_can_be_null=True,
            ),
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _floats(column: Any, what: str, *, optional: bool = False) -> Floats:
    """Return a column of numbers. Missing ones are NaN if they are `optional`, and an error otherwise."""
    import pyarrow as arrow

    if column.null_count and not optional:
        raise TrefoilError(
            f"{what} has {column.null_count} rows with a missing value",
            "Fill them in, or drop these rows.",
            kind=ErrorKind.MISSING_FIELD,
        )
    try:
        return np.asarray(column.cast(arrow.float64()))
    except arrow.ArrowException as error:
        raise TrefoilError(
            f"{what} has text where numbers belong: {_first_line(error)}",
            "Write plain numbers, such as 12.5.",
            kind=ErrorKind.WRONG_TYPE,
        ) from error


def _encode(column: Any) -> Ints:
    """Return integer codes for names, by first appearance; -1 where missing."""
    import pyarrow.compute as compute

    indices = column.combine_chunks().dictionary_encode().indices
    result: Ints = compute.fill_null(indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _columns(table: Table, what: str, required: Sequence[str], optional: Sequence[str], names: Names) -> dict[str, Any]:
    """Return columns of a table by our names; `names` has those that the table calls otherwise.

    A table is the path of a CSV or Parquet file (or a folder of these), a DataFrame, or a mapping to columns.
    """
    unknown = set(names) - {"person", "time", "advertiser", "product", "value"}
    if unknown:
        raise TrefoilError(
            f"there is no column {sorted(unknown)[0]!r} to give another name",
            "Columns are person, time, advertiser, product and value.",
            kind=ErrorKind.UNKNOWN_NAME,
        )
    theirs = {ours: names.get(ours, ours) for ours in (*required, *optional)}
    existing, columns = _opened(table, what, theirs.values())
    for ours, name in theirs.items():
        if name not in existing and (ours in required or ours in names):
            raise TrefoilError(
                f"the {what} have no column {name!r}; they have {', '.join(map(str, existing)) or 'none'}",
                "Give the table that has it." if ours in names else f'Name it: columns={{"{ours}": "your column"}}',
                kind=ErrorKind.MISSING_FIELD,
            )
    return {ours: columns[name] for ours, name in theirs.items() if name in existing}


def _opened(table: Table, what: str, wanted: Collection[str]) -> tuple[list[str], Any]:
    """Return all names of columns of a table, and at least the wanted columns."""
    import pyarrow as arrow

    if isinstance(table, str | Path):
        path = Path(table)
        if path.suffix.lower() not in (".csv", ".tsv"):
            return _parquet(path, wanted)
        table = _csv(path)
    try:
        if isinstance(table, Mapping):
            table = arrow.table({str(name): column for name, column in table.items()})
        elif hasattr(table, "columns") and hasattr(table, "dtypes"):
            table = arrow.Table.from_pandas(table, preserve_index=False)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise TrefoilError(
            f"the {what} are no table: {_first_line(error)}",
            "Columns have equal lengths and one type each.",
            kind=ErrorKind.MALFORMED,
        ) from None
    if hasattr(table, "column_names"):
        return table.column_names, table
    raise TrefoilError(
        f"the {what} are a {type(table).__name__}",
        "Give the path of a CSV or Parquet file, a DataFrame, or a mapping from names to columns.",
        kind=ErrorKind.WRONG_TYPE,
    )


def _csv(path: Path) -> Any:
    import pyarrow.csv as csv

    if not path.is_file():
        raise TrefoilError(f"no file at {path}", "Give a CSV file with a header.", kind=ErrorKind.FILE_MISSING)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with _reading(path, "CSV", "It needs a header and the same number of columns in every row."):
        return csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter))


def _codes(name: str, *columns: Any) -> list[Ints]:
    """Return numbers for the names in one or more columns, equal for equal names; none may be missing."""
    import pyarrow as arrow

    if any(column.null_count for column in columns):
        raise TrefoilError(f"a row has no {name}", "Fill it in, or drop the row.", kind=ErrorKind.MISSING_FIELD)
    if len({column.type for column in columns}) > 1:
        # As text, 7 in one table and "7" in the other are the same person.
        columns = tuple(column.cast(arrow.string()) for column in columns)
    chunks = [chunk for column in columns for chunk in arrow.chunked_array(column).chunks]
    codes = _encode(arrow.chunked_array(chunks, type=columns[0].type))
    return np.split(codes, np.cumsum([len(column) for column in columns])[:-1])


def _times(column: Any) -> Ints:
    """Return a column of timestamps, dates, text or seconds as whole seconds since 1970."""
    import pyarrow as arrow

    types = arrow.types
    if types.is_date(column.type) or types.is_string(column.type) or types.is_large_string(column.type):
        try:
            column = column.cast(arrow.timestamp("s"))
        except arrow.ArrowException:
            raise TrefoilError(
                "the column time has text that is no timestamp",
                "Write 2026-05-27T10:00:00, or seconds since 1970.",
                kind=ErrorKind.WRONG_TYPE,
            ) from None
    if types.is_timestamp(column.type):
        column = column.cast(arrow.timestamp("s"), safe=False).cast(arrow.int64())
    return np.floor(_floats(column, "the column time")).astype(np.int64)


def data_frame(rows: Sequence[Mapping[str, object]]) -> Any:  # Any: pandas has no types here
    """Return rows as a DataFrame."""
    try:
        import pandas
    except ImportError:
        raise not_installed("a table needs pandas") from None
    return pandas.DataFrame(list(rows))
