"""Aggregation services: the helper sets that a device trusts, each under the name by which a site chooses it.

Sets and names come from the device's vendor, never from a site. Any site may choose any of them, so a device's reports
are as safe as the weakest set that it trusts. Budgets do not depend on services: they are the device's and the site's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from device.stores.storage import ServiceStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet, check_key_ids
from protocol.net.json_message import decode_json

# More than any vendor lists; every set is verified whenever a device is opened.
MAX_SERVICES = 16
# What a structured header can carry as a string, without its delimiters.
_NAME = re.compile(r"[!#-\[\]-~]{1,255}")
_LOG = logging.getLogger(__name__)


def trusted_sets(services: ServiceStore) -> dict[str, HelperSet]:
    """Return the sets that a report can be sealed to, by name. A damaged set is logged and left out."""
    sets = {}
    for name, signed_set in services.all().items():
        try:
            sets[name] = _read(signed_set)
        except TrefoilError as error:
            _LOG.error("ignoring the damaged helper set of the service %s: %s", name, error)
    return sets


def add(services: ServiceStore, name: str, helper_set: HelperSet, now: int) -> None:
    """Trust a set under a new name."""
    names = services.all()
    if not _NAME.fullmatch(name):
        raise TrefoilError(
            f"{name[:255]!r} cannot be the name of a service",
            "A name has 1 to 255 characters of printable ASCII, without spaces, quotes and backslashes.",
            kind=ErrorKind.MALFORMED,
        )
    if name in names:
        raise TrefoilError(
            f"this device holds the service {name} already",
            "Renew it with: trefoil device service renew",
            kind=ErrorKind.DUPLICATE,
        )
    if len(names) >= MAX_SERVICES:
        raise TrefoilError(
            f"a device holds {MAX_SERVICES} services at most",
            "Remove one that is not needed.",
            kind=ErrorKind.TOO_LARGE,
        )
    _check_usable(helper_set, now)
    services.keep(name, _encode(helper_set))


def renew(services: ServiceStore, name: str, helper_set: HelperSet, now: int) -> bool:
    """Replace a set by the next one of the same three helpers. Return whether it differs from the present one.

    The chain of trust: all three helpers of the present set must have signed the next, which has a higher number.
    """
    older = _trusted_set(services, name)
    if helper_set.signed_bytes() == older.signed_bytes():
        return False
    if [one.identity_key for one in helper_set.helpers] != [one.identity_key for one in older.helpers]:
        raise TrefoilError(
            f"set {helper_set.number} is of other helpers than those that {name} is trusted for",
            "If the device's vendor says so, remove the service, and add it with the new set.",
            kind=ErrorKind.WRONG_HELPER_SET,
        )
    if helper_set.number <= older.number:
        raise TrefoilError(
            f"{name} has set {older.number} already, and set {helper_set.number} is no later one",
            "Fetch the newest helper set from your device's vendor.",
            kind=ErrorKind.ROLLED_BACK,
        )
    check_key_ids((older, helper_set))
    _check_usable(helper_set, now)
    services.keep(name, _encode(helper_set))
    return True


def remove(services: ServiceStore, name: str) -> None:
    """Stop trusting a set. Reports that were sealed to it are not affected."""
    if name not in services.all():
        raise _unknown(name)
    services.remove(name)


def with_given(sets: Mapping[str, HelperSet], name: str, given: HelperSet) -> dict[str, HelperSet]:
    """Return the sets with one more for this call. It must not replace a different set of the same name."""
    if name in sets and sets[name].digest != given.digest:
        raise TrefoilError(
            f"this device holds another helper set for the service {name}",
            "Leave --helpers out, or renew the service with: trefoil device service renew",
            kind=ErrorKind.WRONG_HELPER_SET,
        )
    return {**sets, name: given}


def _trusted_set(services: ServiceStore, name: str) -> HelperSet:
    signed_set = services.all().get(name)
    if signed_set is None:
        raise _unknown(name)
    try:
        return _read(signed_set)
    except TrefoilError as error:
        raise TrefoilError(
            f"the helper set of the service {name} is damaged: {error}",
            "Remove the service, and add it again.",
            kind=ErrorKind.FILE_DAMAGED,
        ) from None


def _unknown(name: str) -> TrefoilError:
    return TrefoilError(
        f"this device holds no service {name[:255]!r}",
        "Add it with: trefoil device service add",
        kind=ErrorKind.UNKNOWN_NAME,
    )


def _check_usable(helper_set: HelperSet, now: int) -> None:
    """Raise unless all three helpers have signed and a report could be sealed to the set now."""
    helper_set.verify()
    helper_set.sealing_keys(now)


def _read(signed_set: bytes) -> HelperSet:
    helper_set = HelperSet.from_json(decode_json(signed_set))
    helper_set.verify()
    return helper_set


def _encode(helper_set: HelperSet) -> bytes:
    return json.dumps(helper_set.to_json()).encode()
