"""What the commands of `trefoil device service` do: which helper sets a device trusts, under which names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from device import agent, services
from device.device import Device
from device.instance import token_path
from device.limits import DeviceLimits
from protocol.console import out, say
from protocol.errors import TrefoilError
from protocol.files import made_together
from protocol.helper_set import HelperSet

# What SQLite keeps beside a database that is open.
SQLITE_ENDINGS = ("-wal", "-shm", "-journal")


def add(db: Path, name: str, helpers: Path) -> dict[str, object]:
    """Trust a signed set under a new name, on a device that is made if need be."""
    helper_set = HelperSet.load(helpers)
    with present(db), agent.opened_store(db) as store, store.transaction():
        services.add(store.services, name, helper_set, agent.system_clock())
    say(f"sites may now choose {name}: {_who(helper_set)}")
    return _as_json(name, helper_set)


def renew(db: Path, name: str, helpers: Path) -> dict[str, object]:
    """Take the next set of the same three helpers."""
    helper_set = HelperSet.load(helpers)
    with agent.opened_store(db) as store, store.transaction():
        changed = services.renew(store.services, name, helper_set, agent.system_clock())
    say(f"{name} has set {helper_set.number} {'now' if changed else 'already'}")
    return _as_json(name, helper_set) | {"changed": changed}


def remove(db: Path, name: str) -> dict[str, object]:
    """Trust the set of a name no longer."""
    with agent.opened_store(db) as store, store.transaction():
        services.remove(store.services, name)
    say(f"no site can choose {name} any more")
    return {"removed": name}


def show(db: Path) -> dict[str, object]:
    """Every service, whose it is, and whether a report could be sealed to it now."""
    with agent.opened_store(db) as store, store.transaction():
        names, sets = list(store.services.all()), services.held(store.services)
    table = Table("service", "set", "helpers", "reports can be sealed")
    for name in names:
        helper_set = sets.get(name)
        if helper_set is None:
            table.add_row(name, "-", "-", "no: it is damaged; remove it and add it again")
        else:
            table.add_row(name, str(helper_set.number), _who(helper_set), _state(helper_set))
    out.print(table if names else "this device holds no helper set: trefoil device service add", highlight=False)
    return {"services": [_as_json(name, sets[name]) for name in names if name in sets]}


def chosen_set(db: Path, helpers: Path | None, service: str) -> HelperSet:
    """The set of a service: what the device holds, or what is handed in for a name that it does not hold."""
    with agent.opened_store(db) as store, store.transaction():
        sets = services.held(store.services)
    if helpers is not None:
        sets = services.with_given(sets, service, HelperSet.load(helpers))
    return sets[DeviceLimits(aggregation_services=frozenset(sets)).known_service(service)]


@contextmanager
def opened_for(db: Path, helpers: Path | None, service: str) -> Iterator[tuple[HelperSet, Device[agent.Report]]]:
    """The set of a service, and the device open to seal to it; made if need be."""
    with present(db):
        helper_set = chosen_set(db, helpers, service)
        with agent.opened(db, helper_set, service=service) as device:
            yield helper_set, device


@contextmanager
def present(db: Path) -> Iterator[None]:
    """The database, made if there is none. One that is made for this block is gone again if the block fails.

    Where a database was lost and its token is left, the new one stays: it knows what may have been spent.
    """
    if db.exists():
        yield
        return
    token = token_path(db)
    files = () if token.exists() else (db, token, *(db.with_name(db.name + end) for end in SQLITE_ENDINGS))
    with made_together(*files):
        agent.create(db)
        yield
    say(f"{db} is a new device")


def _who(helper_set: HelperSet) -> str:
    return ", ".join(helper.name for helper in helper_set.helpers)


def _state(helper_set: HelperSet) -> str:
    try:
        suite = helper_set.sealing_keys(agent.system_clock())[0].suite
    except TrefoilError as error:
        return f"no: {error}"
    return f"yes, in suite {suite.value}"


def _as_json(name: str, helper_set: HelperSet) -> dict[str, object]:
    return {
        "name": name,
        "number": helper_set.number,
        "digest": helper_set.digest.hex(),
        "helpers": [helper.name for helper in helper_set.helpers],
    }
