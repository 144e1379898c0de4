"""Permissions policy: which of a page's frames may call, as its own Permissions-Policy header says.

Both features are for everybody unless the page says otherwise, as in the standard. A device sees no responses: whoever
embeds it passes the header on. What a frame's `allow` attribute takes away is for the browser to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from device.errors import DOMException
from device.structured_fields import Member, Token, parse_dictionary
from protocol.errors import ProtocolError


class Feature(Enum):
    """What a policy can forbid, by the standard's names."""

    SAVE_IMPRESSION = "save-impression"
    MEASURE_CONVERSION = "measure-conversion"


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The origins that may use a feature: everybody, the page itself, and those named."""

    everybody: bool = False
    itself: bool = False
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, member: Member) -> Allowlist:
        """A list, or one of two words. Whatever else stands there allows nobody, as browsers read it."""
        items = member if type(member) is tuple else (member,) if type(member) is Token else ()
        words = {item.word for item in items if type(item) is Token}
        return cls("*" in words, "self" in words, frozenset(item for item in items if type(item) is str))

    def allows(self, page: str, caller: str) -> bool:
        return self.everybody or caller in self.origins or (self.itself and caller == page)


class PermissionsPolicy:
    """The policy of one page. A feature that it does not mention is for everybody."""

    def __init__(self, allowed: Mapping[Feature, Allowlist]) -> None:
        self._allowed = dict(allowed)

    @classmethod
    def parse(cls, header: str) -> PermissionsPolicy:
        """From a header. One that cannot be read counts as absent, as in browsers."""
        try:
            members = parse_dictionary(header)
        except ProtocolError:
            members = {}
        named = {feature: members[feature.value] for feature in Feature if feature.value in members}
        return cls({feature: Allowlist.of(member) for feature, member in named.items()})

    def check(self, feature: Feature, page: str, caller: str) -> None:
        """NotAllowedError unless a document of the origin `caller` may use `feature` on a page of the origin `page`."""
        if not self._allowed.get(feature, Allowlist(everybody=True)).allows(page, caller):
            raise DOMException("NotAllowedError", f"the page's permissions policy forbids {feature.value} to {caller}")
