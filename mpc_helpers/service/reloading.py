"""Reading the configuration again while a helper runs: sites at once; for anything else its parts are built once more.

A file that cannot be used changes nothing, and the health page says so. Where more than sites has changed, queries go
on as after a restart: what is on disk decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.policy import Policy
from protocol.errors import TrefoilError
from protocol.files import write_atomically

PROCESS_FILE = "process"
_LOG = logging.getLogger("trefoil.reloading")


@dataclass(slots=True)
class Reloads:
    """How often one process has read its configuration again, and whether it could not use what it read last."""

    count: int = 0
    refused: bool = False

    def take(self, what: str) -> None:
        """It is used."""
        self.count += 1
        self.refused = False
        _LOG.info("the configuration was read again: %s", what)

    def refuse(self, error: TrefoilError) -> None:
        """It is not, and what was used before still is."""
        self.count += 1
        self.refused = True
        _LOG.error("the configuration was read again and is not used: %s (%s)", error, error.hint)

    def reasons(self) -> list[Reason]:
        """For the health page, which anyone may read: why stands in the log, for it may name sites and paths."""
        text = "the configuration was changed and is not used: the log says why"
        return [Reason(Concern.CONFIGURATION, text)] if self.refused else []


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and what its files say."""

    config: HelperConfig
    membership: Membership

    @classmethod
    def read(cls, path: Path, now: int) -> Loaded:
        """All of it, checked as at a start."""
        config = load_config(path)
        return cls(config, load_membership(config, now))

    def differs_in_sites_only(self, other: Loaded) -> bool:
        """Whether nothing but the sites need be replaced."""
        return (
            replace(self.config, sites=other.config.sites) == other.config
            and self.membership.known_sets == other.membership.known_sets
            and set(self.membership.hpke) == set(other.membership.hpke)
        )


async def read_again(
    path: Path, used: Loaded, policy: Policy, reloads: Reloads, clock: Callable[[], int]
) -> HelperConfig | None:
    """Take new sites at once. Gives the new configuration if the helper's parts must be built for it."""
    try:
        fresh = await asyncio.to_thread(Loaded.read, path, clock())
    except TrefoilError as error:
        reloads.refuse(error)
        return None
    if not fresh.differs_in_sites_only(used):
        return fresh.config
    policy.sites = fresh.config.sites
    reloads.take(f"{len(policy.sites)} sites are registered")
    return None


def write_process(config: HelperConfig) -> None:
    """Run by a daemon that starts: which process it is, for `trefoil helper reload`."""
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(config.data / PROCESS_FILE, f"{os.getpid()} {_start_of(os.getpid())}\n".encode(), 0o600)


def ask_to_reload(config: HelperConfig) -> int:
    """Run by an operator: tell the helper of this configuration to read it again. Gives its process id."""
    hint = "Start it: it reads its configuration then."
    try:
        number, start = (config.data / PROCESS_FILE).read_text().split()
        pid = int(number)
    except (OSError, ValueError):
        raise TrefoilError(f"no helper has run from {config.data}", hint) from None
    # A process id is used again some day, for a process that may end at this signal.
    if _start_of(pid) != start:
        raise TrefoilError(f"the helper of {config.data} does not run", hint)
    try:
        os.kill(pid, signal.SIGHUP)
    except OSError as error:
        hint = "Run this as the user that the helper runs as."
        raise TrefoilError(f"the helper cannot be told: {error.strerror}", hint) from None
    return pid


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; "none" if there is no such process."""
    try:
        # What stands before is the command's name, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "none"
