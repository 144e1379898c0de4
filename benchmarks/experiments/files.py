"""Reading the real data sets, for those who have them: PATCG's parquet files and Criteo's tab-separated log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import criteo, patcg
from benchmarks.experiments.world import Floats, Ints, stable_order
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


def read_patcg(impressions: Path, conversions: Path) -> patcg.Events:
    """Read PATCG's exposures and conversions, each a parquet file or a folder of them."""
    seen = _parquet(impressions, ("exp_timestamp", "device_id"))
    done = _parquet(conversions, ("conv_timestamp", "device_id", "conv_attribute_2", "conv_amount"))
    person, seen_person = _encode_together(done["device_id"], seen["device_id"])
    time, seen_time = _seconds(done["conv_timestamp"], conversions), _seconds(seen["exp_timestamp"], impressions)
    amount = _floats(done["conv_amount"], conversions)
    if len(person) == 0:
        raise TrefoilError(f"{conversions} has no conversions", kind=ErrorKind.TOO_FEW)
    if not np.all(amount >= 0):
        raise TrefoilError(f"{conversions} has negative or missing amounts in conv_amount", kind=ErrorKind.OUT_OF_RANGE)
    converts = np.flatnonzero(np.isin(seen_person, person))
    order, seen_order = _order(person, time), _order(seen_person[converts], seen_time[converts])
    return patcg.Events(
        seen_person=seen_person[converts][seen_order],
        seen_time=seen_time[converts][seen_order],
        person=person[order],
        time=time[order],
        product=_encode(done["conv_attribute_2"])[order],
        value=patcg.cents(amount)[order],
    )


def read_criteo(path: Path) -> criteo.Log:
    """Read Criteo's log. Rows without partner, user or product are dropped; a missing price or amount counts as 1."""
    table = _criteo_table(path)
    numbers = {name: _floats(table[name], path, missing=np.nan) for name in _NUMBERS}
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
    return criteo.Log(
        seen_user=codes["user_id"][rows],
        seen_advertiser=codes["partner_id"][rows],
        seen_time=clicked[rows],
        user=codes["user_id"][sold],
        advertiser=codes["partner_id"][sold],
        category=codes["product_category3"][sold],
        time=clicked[sold] + np.maximum(0, delay[sold]),
        value=pieces(numbers["SalesAmountInEuro"][sold], numbers["product_price"][sold]),
    )


def pieces(amount: Floats, price: Floats) -> Ints:
    """Return min(5, max(1, amount // price)), and 1 where either is missing."""
    valid = np.isfinite(amount) & np.isfinite(price) & (price > 0)
    whole = np.where(valid, amount, 1.0) // np.where(valid, price, 1.0)
    counted: Ints = np.clip(whole, 1, criteo.CAP).astype(np.int64)
    return counted


def _parquet(path: Path, columns: Sequence[str]) -> Any:
    """Read the named columns of a parquet file, or of all parquet files in a folder."""
    import pyarrow as arrow
    import pyarrow.dataset

    files = sorted([*path.glob("*.pqt"), *path.glob("*.parquet")]) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise TrefoilError(
            f"no parquet file at {path}",
            "Give a .parquet or .pqt file, or the folder that holds them.",
            kind=ErrorKind.FILE_MISSING,
        )
    try:
        return arrow.dataset.dataset([str(file) for file in files], format="parquet").to_table(columns=list(columns))
    except (arrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise TrefoilError(
            f"{path} could not be read as parquet with columns {', '.join(columns)}: {_first_line(error)}",
            kind=ErrorKind.FILE_UNREADABLE,
        ) from error


def _criteo_table(path: Path) -> Any:
    import pyarrow as arrow
    import pyarrow.csv as csv

    if not path.is_file():
        raise TrefoilError(
            f"no file at {path}", "Give the unpacked CriteoSearchData file.", kind=ErrorKind.FILE_MISSING
        )
    types = {name: arrow.float64() for name in _NUMBERS} | {name: arrow.string() for name in _NAMES}
    try:
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
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise TrefoilError(
            f"{path} is not the Criteo log: {_first_line(error)}",
            f"It has {len(CRITEO_COLUMNS)} tab-separated columns and no header.",
            kind=ErrorKind.WRONG_FILE,
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _floats(column: Any, path: Path, missing: float | None = None) -> Floats:
    """Return a column of numbers. Missing ones are NaN, or an error if `missing` is None."""
    if missing is None and column.null_count:
        raise TrefoilError(f"{path} has {column.null_count} rows with a missing value", kind=ErrorKind.MISSING_FIELD)
    import pyarrow as arrow

    try:
        numbers = column.cast(arrow.float64())
    except arrow.ArrowException as error:
        raise TrefoilError(
            f"{path} has text where numbers belong: {_first_line(error)}", kind=ErrorKind.WRONG_TYPE
        ) from error
    result: Floats = (
        numbers.to_numpy(zero_copy_only=False) if hasattr(numbers, "chunks") is False else numbers.to_numpy()
    )
    return result


def _seconds(column: Any, path: Path) -> Ints:
    """Return a column of times as whole seconds since 1970."""
    import pyarrow as arrow

    if arrow.types.is_timestamp(column.type):
        column = column.cast(arrow.timestamp("s"), safe=False).cast(arrow.int64())
    return np.floor(_floats(column, path)).astype(np.int64)


def _encode(column: Any) -> Ints:
    """Return integer codes for names, by first appearance; -1 where missing."""
    import pyarrow.compute as compute

    combined = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    indices = combined.dictionary_encode().indices
    result: Ints = compute.fill_null(indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _encode_together(first: Any, second: Any) -> tuple[Ints, Ints]:
    """Return integer codes for two columns, equal for equal names."""
    import pyarrow as arrow

    if first.type != second.type:
        raise TrefoilError(
            f"device_id is {first.type} in one file and {second.type} in the other", kind=ErrorKind.INCONSISTENT
        )
    codes = _encode(arrow.chunked_array([*first.chunks, *second.chunks], type=first.type))
    return codes[: len(first)], codes[len(first) :]


def _order(owner: Ints, time: Ints) -> Ints:
    """Return a stable order by owner, then time."""
    by_time = stable_order(time)
    return by_time[stable_order(owner[by_time])]
