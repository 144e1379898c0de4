"""Sites: registrable domains by the public suffix list, with private domains; no addresses, no localhost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import DOMException
from device.site import parse_site


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("shop.example", "shop.example"),
        ("www.shop.example", "shop.example"),
        ("a.b.c.shop.co.uk", "shop.co.uk"),
        ("ann.github.io", "ann.github.io"),
        ("x.ann.github.io", "ann.github.io"),
        ("SHOP.Example", "shop.example"),
        ("shop.example.", "shop.example"),
        ("münchen.de", "xn--mnchen-3ya.de"),
        ("www.münchen.de", "xn--mnchen-3ya.de"),
        ("a_b.shop.example", "shop.example"),
        ("x.unknown-suffix", "x.unknown-suffix"),
        ("www.ck", "www.ck"),
    ],
)
def test_a_host_stands_for_its_site(host: str, site: str) -> None:
    assert parse_site(host) == site
    assert parse_site(site) == site


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            ".",
            "..",
            "a",
            "com",
            "co.uk",
            "github.io",
            ":",
            "shop.example:443",
            "https://shop.example",
            "a b.example",
        ),
        *("a/b.example", "-a.example", "a..example", ".shop.example", "127.0.0.1", "1.2.3", "0x7f.1", "[::1]"),
        *("%41.example", "localhost", "foo.localhost", "LOCALHOST", "localhost.", "\x00.example"),
        *("x" * 64 + ".example", "a." * 130 + "example"),
    ],
)
def test_what_is_no_site(host: str) -> None:
    with pytest.raises(DOMException) as refused:
        parse_site(host)
    assert refused.value.name == "SyntaxError"
    assert refused.value.standard_name == {"error": "DOMException", "name": "SyntaxError"}


@given(st.text(max_size=40))
def test_any_text_is_a_site_or_a_syntax_error(host: str) -> None:
    try:
        site = parse_site(host)
    except DOMException:
        return
    assert parse_site(site) == site
    assert site.isascii()
    assert " " not in site


def test_a_host_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    assert parse_site(longest) == f"{'c' * 63}.{'d' * 61}"
    for wrong in (f"{longest}e", "", "."):
        with pytest.raises(DOMException):
            parse_site(wrong)


@pytest.mark.parametrize("host", [None, 5, b"shop.example", ["shop.example"], {}, object()])
def test_what_is_no_text_is_no_site(host: object) -> None:
    """Also what cannot be a key of a cache."""
    with pytest.raises(DOMException, match="a site is text") as refused:
        parse_site(host)
    assert refused.value.name == "SyntaxError"
