"""The MariaDB that is installed on this machine, as a server of our own: there is no wheel with one."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pymysql
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from fencing.embedded import processes
from fencing.embedded.postgres import UNPRIVILEGED
from fencing.embedded.server import Server, ServerFailed, version_of
from fencing.errors import ConfigurationError

NAME = "fencing"  # of the administrator, and of the database in the url
INSTALL_LIMIT = 30.0  # seconds; it takes less than one
ANSWER_LIMIT = 2.0  # seconds for one reply
DROP_LIMIT = 10  # seconds for somebody's open transaction to end; MariaDB would wait for a day


class MariaDBServer(Server):
    """A real MariaDB on 127.0.0.1 that never waits for the disk: `kill` loses the last second of commits.

    The administrator has a password, which `url` holds. `settings` are those of ``mariadbd``, such as
    ``{"innodb-flush-log-at-trx-commit": "1"}``; no configuration of this machine is read. Started by root,
    it runs as ``nobody``.
    """

    _stop_signal = signal.SIGTERM

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory=None, port=None)
        self._settings = dict(settings or {})
        self._password = secrets.token_hex()

    @classmethod
    def program(cls) -> Path:
        """The server's program. ConfigurationError if there is none."""
        return _program("mariadbd")

    @classmethod
    def installed_version(cls) -> str:
        return version_of(cls.program())

    @property
    def url(self) -> str:
        return f"mysql+pymysql://{NAME}:{self._password}@{self.host}:{self.port}/{NAME}?charset=utf8mb4"

    def _prepare(self) -> None:
        if os.geteuid() == 0:
            self._user = pwd.getpwnam(UNPRIVILEGED)
        self._first_words.write_text(
            f"CREATE DATABASE IF NOT EXISTS {NAME};\n"
            f"GRANT ALL ON *.* TO {NAME}@'%' IDENTIFIED BY '{self._password}' WITH GRANT OPTION;\n"
        )
        self._first_words.chmod(0o600)
        if self._user is not None:
            for path in (self._sockets, self._first_words):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        if not self._data.exists():
            self._install()

    def _command(self) -> list[str]:
        settings = {
            "bind-address": self.host,
            "port": str(self.port),
            "socket": str(self._socket),
            "pid-file": str(self._sockets / "pid"),
            "init-file": str(self._first_words),
            "skip-networking": "0",
            "skip-name-resolve": "1",
            "character-set-server": "utf8mb4",
            **self._small(),
            **self._settings,
        }
        return [str(self.program()), "--no-defaults", *_words(settings)]

    def _answers(self) -> bool:
        client = pymysql.Connection(
            user=NAME, password=self._password, read_timeout=ANSWER_LIMIT, defer_connect=True
        )
        with socket.socket(socket.AF_UNIX) as line:  # one that PyMySQL opens stays open if it is refused
            try:
                line.connect(str(self._socket))
                client.connect(line)
                client.close()
            except (OSError, pymysql.err.OperationalError):
                return False
        return True

    @property
    def _socket(self) -> Path:
        return self._sockets / "mariadb.sock"

    @property
    def _first_words(self) -> Path:
        """What the server runs at each start, before it lets anybody in."""
        return self._sockets / "first-words.sql"

    def _small(self) -> dict[str, str]:
        """What keeps the server small and off the disk, while it is installed and while it serves."""
        return {
            "datadir": str(self._data),
            "tmpdir": str(self._sockets),  # the usual one may be closed to the user the server runs as
            "innodb-buffer-pool-size": "16M",
            "innodb-log-file-size": "8M",
            "innodb-flush-log-at-trx-commit": "0",
            "loose-innodb-flush-method": "nosync",
            "aria-pagecache-buffer-size": "1M",
            "key-buffer-size": "1M",
        }

    def _install(self) -> None:
        """Create the system tables, without looking up any name (``--force``).

        By the user the server runs as: run by root with ``--user``, the script would also change who owns
        a directory of the machine's own MariaDB.
        """
        options = ["--no-defaults", "--force", "--skip-name-resolve", "--skip-test-db"]
        command = [str(_program("mariadb-install-db")), *options, *_words(self._small())]
        process = self._popen(command, stdout=subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=INSTALL_LIMIT)
        except subprocess.TimeoutExpired as slow:
            raise ServerFailed(f"{command[0]} took more than {INSTALL_LIMIT:g} s") from slow
        finally:
            if process.returncode is None:
                processes.kill(process.pid, process.communicate)
        if process.returncode != 0:
            raise ServerFailed(f"{command[0]} in {self._data} failed:\n{said.decode(errors='replace')}")


@contextlib.contextmanager
def empty_database(url: str) -> Iterator[str]:
    """The url of a new database on the server at `url`, dropped in the end whoever still uses it."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(CreateSchema(name))
    try:
        yield make_url(url).set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            sessions = text("SELECT id FROM information_schema.processlist WHERE db = :name")
            for session in connection.scalars(sessions, {"name": name}).all():
                with contextlib.suppress(DBAPIError):  # it has just ended by itself
                    connection.execute(text("KILL :session"), {"session": session})
            connection.execute(text("SET lock_wait_timeout = :limit"), {"limit": DROP_LIMIT})
            connection.execute(DropSchema(name))


def _program(name: str) -> Path:
    """Where a program of MariaDB lies, which for some users is not on their PATH."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/bin"])
    found = shutil.which(name, path=places)
    if found is None:
        raise ConfigurationError(f"no {name} on this machine (Debian: apt-get install mariadb-server)")
    return Path(found)


def _words(settings: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]
