"""Reload of the registered sites on SIGHUP. Every other change of the configuration needs a restart.

A restart resumes every query, so only what changes often, and must not interrupt anyone, is reloaded.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass, fields
from pathlib import Path

from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.policy import Policy
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically

PROCESS_FILE = "process"
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class SiteReloads:
    """The reloads of one process, which was started with `config`."""

    config: HelperConfig
    policy: Policy
    count: int = 0
    # Why the file is not used in full; empty if it is.
    problem: str = ""

    def reload(self, path: Path) -> None:
        """Replace the sites by those of the file. A file that cannot be used changes nothing."""
        self.count += 1
        try:
            fresh = load_config(path)
        except TrefoilError as error:
            # The health page is public, and the error may name sites and paths.
            self.problem = "the configuration file cannot be used: the log says why"
            _LOG.error("the sites were not reloaded: %s (%s)", error, error.hint)
            return
        self.policy.sites = fresh.sites
        _LOG.info("reloaded the sites: %d are registered", len(fresh.sites))
        changed = [
            item.name for item in fields(HelperConfig) if item.name != "sites" and self._differs(fresh, item.name)
        ]
        self.problem = f"restart this helper to apply {', '.join(changed)}" if changed else ""
        if changed:
            _LOG.warning("only sites are reloaded: %s", self.problem)

    def _differs(self, fresh: HelperConfig, name: str) -> bool:
        return bool(getattr(fresh, name) != getattr(self.config, name))

    def reasons(self) -> list[Reason]:
        return [Reason(Concern.CONFIGURATION, self.problem)] if self.problem else []


def write_process(config: HelperConfig) -> None:
    """Record which process serves, for `trefoil helper reload`."""
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(config.data / PROCESS_FILE, f"{os.getpid()} {_start_of(os.getpid())}\n".encode(), 0o600)


def request_reload(config: HelperConfig) -> int:
    """Send SIGHUP to the helper of this configuration, and return its process id."""
    hint = "Start it: it reads its configuration then."
    try:
        number, start = (config.data / PROCESS_FILE).read_text().split()
        pid = int(number)
    except (OSError, ValueError):
        raise TrefoilError(f"no helper has run from {config.data}", hint, kind=ErrorKind.FILE_MISSING) from None
    # Process ids are reused, and this signal ends most programs.
    if _start_of(pid) != start:
        raise TrefoilError(f"the helper of {config.data} does not run", hint, kind=ErrorKind.UNAVAILABLE)
    try:
        os.kill(pid, signal.SIGHUP)
    except OSError as error:
        hint = "Run this as the user that the helper runs as."
        message = f"cannot signal the helper: {error.strerror}"
        raise TrefoilError(message, hint, kind=ErrorKind.FORBIDDEN) from None
    return pid


def _start_of(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; "none" if there is no such process."""
    try:
        # The command's name comes before, and may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "none"
