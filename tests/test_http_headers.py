"""Save-Impression and Measure-Conversion headers: the standard's cases, and the grammar's corners."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.conversion import ConversionOptions
from device.http_headers import parse_measure_conversion, parse_save_impression
from device.impression import ImpressionOptions
from device.structured_fields import Token, parse_dictionary
from protocol.errors import ProtocolError

CASES = Path(__file__).parents[2] / "shared" / "w3c" / "http-headers.json"
BASE = "https://base.example/abc/"


def cases(kind: str) -> list[Any]:
    if not CASES.exists():
        return []
    return [pytest.param(case, id=case["name"]) for case in json.loads(CASES.read_text())[kind]]


def snake(options: dict[str, Any]) -> dict[str, Any]:
    named = {re.sub("([A-Z])", lambda match: "_" + match[1].lower(), key): value for key, value in options.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in named.items()}


@pytest.mark.skipif(not CASES.exists(), reason="the standard's header cases (../shared/w3c) are not here")
@pytest.mark.parametrize("case", cases("saveImpression"))
def test_the_standards_save_impression_cases(case: dict[str, Any]) -> None:
    if case["expected"] is None:
        with pytest.raises(ProtocolError):
            parse_save_impression(case["input"])
    else:
        assert parse_save_impression(case["input"]) == ImpressionOptions(**snake(case["expected"]))


@pytest.mark.skipif(not CASES.exists(), reason="the standard's header cases (../shared/w3c) are not here")
@pytest.mark.parametrize("case", cases("measureConversion"))
def test_the_standards_measure_conversion_cases(case: dict[str, Any]) -> None:
    base = json.loads(CASES.read_text())["baseURL"]
    if case["expected"] is None:
        with pytest.raises(ProtocolError):
            parse_measure_conversion(case["input"], base)
    else:
        header = parse_measure_conversion(case["input"], base)
        assert header.options == ConversionOptions(**snake(case["expected"]["options"]))
        assert header.report_url == case["expected"]["reportUrl"]


def test_our_own_example_of_each() -> None:
    impression = parse_save_impression('histogram-index=2, conversion-sites=("a.example" "b.example";x), priority=-1')
    assert asdict(impression) == asdict(ImpressionOptions(2, conversion_sites=("a.example", "b.example"), priority=-1))
    conversion = parse_measure_conversion(
        'aggregation-service="trefoil", histogram-size=4, report-url="/reports?x=1", epsilon=0.5, credit=(2 1.5)', BASE
    )
    assert conversion.options == ConversionOptions("trefoil", 4, epsilon=0.5, credit=(2, 1.5))
    assert conversion.report_url == "https://base.example/reports?x=1"


def test_the_least_of_every_number_is_taken() -> None:
    impression = parse_save_impression("histogram-index=0, match-value=0, lifetime-days=1, priority=0")
    assert impression == ImpressionOptions(0, 0, lifetime_days=1)
    least = "value=1, max-value=1, lookback-days=1, match-values=(0), kappa=0"
    header = f'aggregation-service="trefoil", histogram-size=1, report-url="/r", {least}'
    assert parse_measure_conversion(header, BASE).options == ConversionOptions(
        "trefoil", 1, lookback_days=1, match_values=(0,)
    )
    assert parse_save_impression("histogram-index=1, lifetime-days=999999").lifetime_days == 999_999


@pytest.mark.parametrize("wrong", ["match-values=3", 'impression-sites="a.example"', "credit=1", "histogram-size=0"])
def test_a_list_is_in_brackets_and_a_size_is_not_zero(wrong: str) -> None:
    header = f'aggregation-service="trefoil", histogram-size=1, report-url="/r", {wrong}'
    with pytest.raises(ProtocolError):
        parse_measure_conversion(header, BASE)


def test_a_side_query_by_header_is_a_member_of_ours() -> None:
    """The standard ignores keys that it does not know, so the same header serves other devices too."""
    header = 'aggregation-service="trefoil", histogram-size=4, report-url="/r", kappa=5'
    assert parse_measure_conversion(header, BASE).options == ConversionOptions("trefoil", 4, kappa=5)
    with pytest.raises(ProtocolError, match="kappa"):
        parse_measure_conversion(header.replace("kappa=5", "kappa=-1"), BASE)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a", {"a": True}),
        ("a=1, b=-2", {"a": 1, "b": -2}),
        ("a=1.25", {"a": 1.25}),
        ("a=1.255", {"a": 1.255}),
        ("a=1; b;  c=2", {"a": 1}),
        ("a=:aGk:", {"a": b"hi"}),
        ('a="x\\"\\\\y"', {"a": 'x"\\y'}),
        ("a=tok/en:1", {"a": Token("tok/en:1")}),
        ("a=?0;p=?1", {"a": False}),
        ("a=:aGk=:", {"a": b"hi"}),
        ("a=( 1   2;q=3 )", {"a": (1, 2)}),
        ("a=()", {"a": ()}),
        ("a=1,\t b=2", {"a": 1, "b": 2}),
        ("a=1, a=2", {"a": 2}),
        ("*a.b-c_d=1", {"*a.b-c_d": 1}),
        ("  ", {}),
        ("", {}),
        ("a=999999999999999", {"a": 999_999_999_999_999}),
    ],
)
def test_dictionaries(text: str, value: dict[str, Any]) -> None:
    assert parse_dictionary(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "!",
        "A=1",
        "a=",
        "a=1,",
        "a=1 b=2",
        "a=(1",
        "a=(1,2)",
        "a=1.",
        "a=1.2345",
        "a=1000000000000000",
        "a=1234567890123.1",
        'a="x',
        'a="\\x"',
        'a="\x7f"',
        "a=?2",
        "a=:!:",
        "a=:a:",
        "a=1;",
        "a=1;B",
        "a=--1",
        "a=-",
        "=1",
        "a=\xe9",
        'a=("x""y")',
        "a=\t1",
    ],
)
def test_what_is_no_dictionary(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_dictionary(text)


@pytest.mark.parametrize(
    "address",
    ["http://r.example", "https://", "https://:", "https://r.example:x", "javascript:1", "https://[1", "//:80"],
)
def test_reports_go_to_https_addresses_only(address: str) -> None:
    with pytest.raises(ProtocolError):
        parse_measure_conversion(f'aggregation-service="", histogram-size=1, report-url="{address}"', BASE)


@pytest.mark.parametrize(
    ("address", "resolved"),
    [
        ("https://R.Example:443", "https://r.example/"),
        ("//r.example:8443/x", "https://r.example:8443/x"),
        ("../x", "https://base.example/x"),
        ("", BASE),
        ("https://[::1]/x", "https://[::1]/x"),
    ],
)
def test_report_urls_are_resolved(address: str, resolved: str) -> None:
    header = f'aggregation-service="", histogram-size=1, report-url="{address}"'
    assert parse_measure_conversion(header, BASE).report_url == resolved


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """Never another exception: headers come from anyone."""
    with contextlib.suppress(ProtocolError):
        parse_measure_conversion(text, BASE)


def test_a_very_long_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        parse_dictionary("a=1," * 100_000)
