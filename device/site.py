"""Sites: registrable domains, the unit that the standard and the privacy filters count in.

A host stands for its site (`shop.example.co.uk` for `example.co.uk`), by the public suffix list with its private
section, so that two customers of one hosting provider are two sites. Unknown suffixes follow the default rule `*`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from device.errors import DOMException
from protocol.errors import ErrorKind

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList

MAX_HOST_LENGTH = 253
_ENCODED = "xn--"
# Zero-width non-joiner and joiner: invisible, but in some scripts they change how a word is written.
_JOINERS = "\u200c\u200d"
_HINT = "Give a domain such as shop.example."
_HOST = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# The URL standard reads a host whose last label is a number as an IPv4 address, and addresses belong to no site.
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")


@cache
def _suffixes() -> PublicSuffixList:
    # Reading the list takes 0.1 s: only when a device is opened, or the first site is looked at.
    from publicsuffixlist import PublicSuffixList

    return PublicSuffixList(accept_unknown=True)


def load_tables() -> None:
    """Read the public suffix list and the tables of international names.

    Run when a device is opened: else the first call would take longer, and so tell its caller that it is the first.
    """
    _suffixes()
    parse_site("bücher.example")


def parse_site(host: object) -> str:
    """Return the site of `host`, or raise the standard's SyntaxError.

    Not cached: from the time of its own call a site would learn which hosts this device has met.
    """
    if type(host) is not str:
        raise DOMException(
            "SyntaxError", f"a site is text, not a {type(host).__name__}", _HINT, kind=ErrorKind.WRONG_TYPE
        )
    name = _ascii(host)
    if not (0 < len(name) <= MAX_HOST_LENGTH) or not _HOST.fullmatch(name):
        raise _refusal(host, "is not a domain name")
    labels = name.split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        raise _refusal(host, "is an address, not a domain name")
    if labels[-1] == "localhost":
        raise _refusal(host, "is this machine, not a site")
    site = _suffixes().privatesuffix(name)
    if site is None:
        raise _refusal(host, "is a public suffix or a single label, which belong to no single site")
    return site


def _ascii(host: str) -> str:
    """Return lower-case A-labels, without the final dot that would make two names of one site."""
    if host.isascii() and _ENCODED not in host.lower():
        return host.lower().removesuffix(".")
    # Reading its tables takes a while: only for names that need them, or when a device is opened.
    import idna

    try:
        labels = [_a_label(label) for label in _mapped(host[: 4 * MAX_HOST_LENGTH]).removesuffix(".").split(".")]
    except (idna.IDNAError, UnicodeError):
        raise _refusal(host, "is not an international domain name") from None
    return ".".join(labels)


def _mapped(name: str) -> str:
    """Map as the URL standard does: non-transitional (straße.de and strasse.de stay two), without STD3."""
    import idna

    return idna.uts46_remap(name, std3_rules=False, transitional=False)


def _a_label(label: str) -> str:
    """Return one label of a mapped name in ASCII. An encoded one must decode to a label with this very encoding."""
    if label.isascii() and not label.startswith(_ENCODED):
        return label
    text = label[len(_ENCODED) :].encode().decode("punycode") if label.isascii() else label
    if _mapped(text) != text:
        raise UnicodeError("not the encoding of its own decoding")
    _check_label(text)
    return _ENCODED + text.encode("punycode").decode("ascii")


def _check_label(label: str) -> None:
    """Run the checks of UTS 46 that the URL standard requires: combining marks, writing direction, joiners."""
    import idna

    idna.check_initial_combiner(label)
    idna.check_bidi(label)
    for place, letter in enumerate(label):
        if letter in _JOINERS and not idna.valid_contextj(label, place):
            raise idna.IDNAError("a joiner without context")


def _refusal(host: str, why: str) -> DOMException:
    return DOMException("SyntaxError", f"{host[:MAX_HOST_LENGTH]!r} {why}", _HINT, kind=ErrorKind.MALFORMED)
