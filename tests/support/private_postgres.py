"""A PostgreSQL server of the tests' own: a temporary cluster on a socket, where its binaries are found.

PostgreSQL refuses to run as root, so it runs as another user where the tests run as root.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from types import MappingProxyType

from mpc_helpers.identity.config import PostgresLocation

_NUMBERS = itertools.count()
_USERS = ("postgres", "nobody")


def why_not() -> str:
    """The reason why there can be no server here; empty if there can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if _binaries() is None:
        return "no PostgreSQL binaries are found"
    if os.geteuid() == 0 and (_user() is None or shutil.which("setpriv") is None):
        return "PostgreSQL does not run as root, and there is no other user to run it as"
    return ""


def _binaries() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if places:
        return places[-1].parent
    there = shutil.which("initdb")
    return Path(there).resolve().parent if there else None


def _user() -> pwd.struct_passwd | None:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return next((names[name] for name in _USERS if name in names), None)


class NoSmallDisk(RuntimeError):
    """A small file system cannot be mounted here."""


class PrivatePostgres:
    """One cluster in memory, where there is such a place: a new one, or a standby of another, which follows it.

    `disks` are the megabytes of a file system of its own for "data", and one for the log, "wal", so that each can fill.
    """

    def __init__(
        self, primary: PrivatePostgres | None = None, *, disks: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="trefoil-pg-", dir=shared if os.access(shared, os.W_OK) else None))
        self._as: list[str] = []
        user = _user()
        if os.geteuid() == 0 and user is not None:
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        self._disks: list[Path] = []
        atexit.register(self.remove)
        for name, size in disks.items():
            self._mount(self.folder / name, size)
        log = ["--wal-segsize=1", f"--waldir={self.folder / 'wal'}"] if "wal" in disks else []
        if primary is None:
            self._run(
                "initdb", "--auth=trust", "--username=trefoil", "--encoding=UTF8", "--no-locale", "--no-sync", *log
            )
        else:
            source = ("--host", str(primary.folder), "--username=trefoil")
            self._run("pg_basebackup", *source, "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        self.start()

    def _mount(self, folder: Path, megabytes: int) -> None:
        owner = self.folder.stat()
        options = f"size={megabytes}m,mode=700,uid={owner.st_uid},gid={owner.st_gid}"
        folder.mkdir()
        try:
            command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            raise NoSmallDisk("a small file system cannot be mounted here, which takes root") from error
        self._disks.append(folder)

    def fill(self, disk: str, rest: int) -> None:
        """Fill a disk up to the last `rest` bytes."""
        free = os.statvfs(self.folder / disk)
        with (self.folder / disk / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize - rest)

    def make_space(self, disk: str) -> None:
        """Remove what `fill` wrote."""
        (self.folder / disk / "filler").unlink()

    def _run(self, program: str, *arguments: str) -> None:
        binaries = _binaries()
        assert binaries is not None
        command = [*self._as, str(binaries / program), "-D", str(self.folder / "data"), *arguments]
        with (self.folder / "output").open("ab") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, cwd=self.folder, timeout=120, check=False, env={"LC_ALL": "C"}
            )
        if done.returncode:
            raise RuntimeError((self.folder / "output").read_text()[-2000:])

    def start(self, settings: str = "-c listen_addresses=") -> None:
        """Start the server; after an immediate stop it recovers first."""
        settings = f"-k {self.folder} -c max_connections=60 -c shared_buffers=64MB {settings}"
        self._run("pg_ctl", "start", "-w", "-t", "60", "-l", str(self.folder / "log"), "-o", settings)

    def serve_tls(self, certificate: bytes, key: bytes, password: str) -> int:
        """Listen on a port of this machine, over TLS and with a password for the role `north`. Return the port."""
        for name, data in (("server.crt", certificate), ("server.key", key)):
            path = self.folder / "data" / name
            path.write_bytes(data)
            path.chmod(0o600)
            owner = self.folder.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
        rules = "local all all trust\nhostssl all north 127.0.0.1/32 scram-sha-256\n"
        (self.folder / "data" / "pg_hba.conf").write_text(rules)
        self._as_client("psql", script=f"CREATE ROLE north LOGIN PASSWORD '{password}' CREATEDB;".encode())
        self._as_client("psql", script=b"GRANT CREATE ON DATABASE postgres TO north;")
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port: int = probe.getsockname()[1]
        self.stop_immediately()
        self.start(f"-c listen_addresses=127.0.0.1 -c port={port} -c ssl=on")
        return port

    def stop_immediately(self) -> None:
        """Stop as in a power cut: no checkpoint, and every session ends where it is."""
        self._run("pg_ctl", "stop", "-m", "immediate", "-w", "-t", "60")

    def promote(self) -> None:
        """Make a standby a server of its own, with what it has received."""
        self._run("pg_ctl", "promote", "-w", "-t", "60")

    def dump(self, schema: str) -> bytes:
        """Return what an operator's nightly dump of this schema would hold."""
        return self._as_client("pg_dump", "--schema", schema)

    def restore(self, schema: str, dump: bytes) -> None:
        """Replace a schema by a dump of it."""
        script = f"DROP SCHEMA {schema} CASCADE;\n".encode() + dump
        self._as_client("psql", "--quiet", "--set=ON_ERROR_STOP=1", "--single-transaction", script=script)

    def _as_client(self, program: str, *arguments: str, script: bytes = b"") -> bytes:
        binaries = _binaries()
        assert binaries is not None
        command = [str(binaries / program), f"--host={self.folder}", "--username=trefoil", *arguments, "postgres"]
        return subprocess.run(command, input=script, capture_output=True, timeout=120, check=True).stdout

    def remove(self) -> None:
        """Stop the server and remove all of it. Idempotent."""
        if not self.folder.exists():
            return
        try:
            self.stop_immediately()
        except (RuntimeError, subprocess.SubprocessError):
            time.sleep(0.1)
        for disk in self._disks:
            # Also if a process that is being ended still has a file open there.
            subprocess.run(["umount", "--lazy", str(disk)], check=False, timeout=60)
        self._disks.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def location(self, schema: str = "") -> PostgresLocation:
        """A place for a ledger that no other test uses."""
        name = schema or f"ledger_{os.getpid()}_{next(_NUMBERS)}"
        return PostgresLocation.parse(f"postgresql://trefoil@/postgres?host={self.folder}&schema={name}")


@cache
def server() -> PrivatePostgres:
    """The cluster of this process, made when the first test asks."""
    return PrivatePostgres()
