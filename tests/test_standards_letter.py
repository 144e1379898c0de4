"""The standard's letter, where scenarios do not show it: minimums of limits, hosts by UTS 46, headers by RFC 9651."""

from __future__ import annotations

import pytest

from device.errors import DOMException
from device.http_headers import clears_impressions, parse_save_impression
from device.limits import DeviceLimits
from device.site import parse_site
from device.structured_fields import Date, DisplayString, parse_dictionary
from protocol.errors import ProtocolError


def test_limits_are_no_lower_than_the_standard_allows() -> None:
    limits = DeviceLimits()
    assert limits.max_match_values >= 30 and limits.max_impression_sites >= 30
    assert limits.max_conversion_sites >= 5 and limits.max_credit_size >= 10
    assert limits.max_conversion_callers >= 10 and limits.max_impression_callers >= 10
    assert limits.max_lookback_days >= 30 and limits.max_impressions_per_site >= 1000
    assert limits.global_budget % limits.site_budget == limits.impression_site_quota % limits.site_budget == 0


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("straße.de", "xn--strae-oqa.de"),
        ("www.STRASSE.de", "strasse.de"),
        ("faß.example", "xn--fa-hia.example"),
        ("münchen.example", "xn--mnchen-3ya.example"),
        ("MÜNCHEN.example", "xn--mnchen-3ya.example"),
        ("ｓｈｏｐ。example", "shop.example"),
        ("βόλος.example", "xn--nxasmm1c.example"),
        ("☕.example", "xn--53h.example"),
        ("例え.jp.", "xn--r8jz45g.jp"),
        # A joiner between letters that it joins or keeps apart (RFC 5892, A.1 and A.2).
        ("क्\u200dष.example", "xn--11b2ezcw70k.example"),
        ("نامه\u200cای.example", "xn--mgba3gch31f060k.example"),
        ("XN--MNCHEN-3YA.example", "xn--mnchen-3ya.example"),
        ("www.xn--strae-oqa.de", "xn--strae-oqa.de"),
    ],
)
def test_hosts_are_mapped_as_browsers_map_them(host: str, site: str) -> None:
    assert parse_site(host) == site


@pytest.mark.parametrize(
    "host",
    [
        "a\u0300\ufffd.example",
        "\u0301a.example",
        "a\u2028b.example",
        "אa.example",
        "１２7.0.0.1",
        # Joiners that join nothing: names that look like others.
        "sho\u200cp.example",
        "sho\u200dp.example",
        "\u200dshop.example",
        "नी\u200dल.example",
        # What no name is encoded as: nothing, plain letters, a capital letter, a joiner, an overflow.
        "xn--.example",
        "xn--shop-.example",
        "xn--mnchen-psa.example",
        "xn--shop-276a.example",
        "xn--99999999.example",
    ],
)
def test_hosts_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(DOMException):
        parse_site(host)


@pytest.mark.parametrize("digits", ["٣", "３", "१२", "1٣"])
def test_only_ascii_digits_are_digits(digits: str) -> None:
    with pytest.raises(ProtocolError):
        parse_save_impression(f"histogram-index={digits}")


def test_dates_and_display_strings_of_unknown_keys_are_ignored() -> None:
    header = 'histogram-index=3, later=@1659578233, name=%"f%c3%bc%c3%bc \\", old=@-62135596800;x=%"a"'
    assert parse_save_impression(header).histogram_index == 3
    assert parse_dictionary('a=@17, b=%"%e2%82%ac"') == {"a": Date(17), "b": DisplayString("€")}


@pytest.mark.parametrize(
    "value", ["@", "@1.5", "@x", "@1234567890123456", '%"a', "%a", '%"%C3%BC"', '%"%c3"', '%"%zz"', '%"ü"', '%"%"']
)
def test_what_is_no_date_and_no_display_string_is_refused(value: str) -> None:
    with pytest.raises(ProtocolError):
        parse_dictionary(f"a={value}")


@pytest.mark.parametrize("value", ["@3", '%"3"'])
def test_a_date_is_no_number_and_a_display_string_no_string(value: str) -> None:
    with pytest.raises(ProtocolError):
        parse_save_impression(f"histogram-index={value}")


@pytest.mark.parametrize(
    ("header", "clears"),
    [
        ('"impressions"', True),
        ('"cache", "impressions"', True),
        ('"*"', True),
        ('"cookies"', False),
        ("impressions", False),
        ('"Impressions"', False),
        ("", False),
        ("*", False),
    ],
)
def test_which_clear_site_data_headers_clear_impressions(header: str, clears: bool) -> None:
    assert clears_impressions(header) is clears
