"""Aggregation services: the helper sets that a device trusts, each under the name by which a site chooses it.

Sets and names come from the device's vendor, never from a site. Any site may choose any of them, so what a device says
is as safe as the weakest set that it holds. Budgets know nothing of services: they are the device's and the site's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from device.service_store import ServiceStore
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet, check_key_ids
from protocol.json_message import decode_json

# More than any vendor lists; every set is verified whenever a device is opened.
MAX_SERVICES = 16
# What a structured header can carry as a string, without what a reader of either could take for an end of it.
_NAME = re.compile(r"[!#-\[\]-~]{1,255}")
_LOG = logging.getLogger("trefoil.device")


def held(services: ServiceStore) -> dict[str, HelperSet]:
    """The sets that a report can be sealed to, by name. One that no longer reads as a signed set is left out."""
    found = {}
    for name, signed_set in services.all().items():
        try:
            found[name] = _read(signed_set)
        except TrefoilError as error:
            _LOG.error("the helper set of the service %s is damaged, and not used: %s", name, error)
    return found


def add(services: ServiceStore, name: str, helper_set: HelperSet, now: int) -> None:
    """Trust a set under a new name."""
    known = services.all()
    if not _NAME.fullmatch(name):
        raise TrefoilError(
            f"{name[:255]!r} cannot be the name of a service",
            "A name has 1 to 255 characters of printable ASCII, without spaces, quotes and backslashes.",
        )
    if name in known:
        raise TrefoilError(
            f"this device holds the service {name} already", "Renew it with: trefoil device service renew"
        )
    if len(known) >= MAX_SERVICES:
        raise TrefoilError(f"a device holds {MAX_SERVICES} services at most", "Remove one that is not needed.")
    _check_usable(helper_set, now)
    services.keep(name, _written(helper_set))


def renew(services: ServiceStore, name: str, helper_set: HelperSet, now: int) -> bool:
    """Hold the next set of the same three helpers; whether it is another one than before.

    The chain of trust: all three helpers of the set that is held must have signed the next, which has a higher number.
    """
    older = _held_as(services, name)
    if helper_set.signed_bytes() == older.signed_bytes():
        return False
    if [one.identity_key for one in helper_set.helpers] != [one.identity_key for one in older.helpers]:
        raise TrefoilError(
            f"set {helper_set.number} is of other helpers than those that {name} is trusted for",
            "If the device's vendor says so, remove the service, and add it with the new set.",
        )
    if helper_set.number <= older.number:
        raise TrefoilError(
            f"{name} has set {older.number} already, and set {helper_set.number} is no later one",
            "Fetch the newest helper set from your device's vendor.",
        )
    check_key_ids((older, helper_set))
    _check_usable(helper_set, now)
    services.keep(name, _written(helper_set))
    return True


def remove(services: ServiceStore, name: str) -> None:
    """Trust a set no longer. Reports that were sealed to it stay with whoever has them."""
    if name not in services.all():
        raise _unknown(name)
    services.remove(name)


def with_given(sets: Mapping[str, HelperSet], name: str, given: HelperSet) -> dict[str, HelperSet]:
    """The sets, and one more that was handed in for the moment. It must not stand in for one that is held."""
    if name in sets and sets[name].digest != given.digest:
        raise TrefoilError(
            f"this device holds another helper set for the service {name}",
            "Leave --helpers out, or renew the service with: trefoil device service renew",
        )
    return {**sets, name: given}


def _held_as(services: ServiceStore, name: str) -> HelperSet:
    signed_set = services.all().get(name)
    if signed_set is None:
        raise _unknown(name)
    try:
        return _read(signed_set)
    except TrefoilError as error:
        raise TrefoilError(
            f"the helper set of the service {name} is damaged: {error}", "Remove the service, and add it again."
        ) from None


def _unknown(name: str) -> TrefoilError:
    return TrefoilError(f"this device holds no service {name[:255]!r}", "Add it with: trefoil device service add")


def _check_usable(helper_set: HelperSet, now: int) -> None:
    """All three have signed, and a report could be sealed to it now."""
    helper_set.verify()
    helper_set.sealing_keys(now)


def _read(signed_set: bytes) -> HelperSet:
    helper_set = HelperSet.from_json(decode_json(signed_set))
    helper_set.verify()
    return helper_set


def _written(helper_set: HelperSet) -> bytes:
    return json.dumps(helper_set.to_json()).encode()
