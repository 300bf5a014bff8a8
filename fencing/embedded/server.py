"""What a Redis and a PostgreSQL server out of a wheel have in common: a process, a port, a directory."""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

from fencing.embedded import processes
from fencing.errors import ConfigurationError, FencingError

START_LIMIT = 30.0  # seconds until a server that does not answer is given up
STOP_LIMIT = 10.0  # seconds an orderly stop may take before it becomes a kill


class ServerFailed(FencingError):
    """A server did not start, or did not do as it was told. The message shows the end of its log."""


class Server(ABC):
    """One server process and its children; `start` it, and end it with `stop` or by leaving ``with``.

    `port`, `url` and `directory` have their values from the first `start` on; port and url stay the same
    over every restart. Data and log live in `directory`; when none was given that is a private one, which
    `stop` removes. At the exit of the process that started it a server is stopped, if not before. In a
    forked child `stop` does nothing. Not safe to control from several threads.
    """

    host: ClassVar[str] = "127.0.0.1"
    _stop_signal: ClassVar[signal.Signals]

    def __init__(self, directory: Path | None, port: int | None) -> None:
        self.port = port or 0
        self._given_directory = directory
        self._home: Path | None = None  # private and with a short path: for the socket, and for data
        self._process: subprocess.Popen[bytes] | None = None
        self._reservation: socket.socket | None = None
        self._started_by = os.getpid()
        self._user: pwd.struct_passwd | None = None  # whom the server runs as, if not as the present user

    @classmethod
    @abstractmethod
    def installed_version(cls) -> str:
        """The version of the server, such as ``6.2.14``. ConfigurationError if the wheel is missing."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make `_data` ready for a start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The program and its arguments."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server serves: asked over its private socket, where nobody else can answer."""

    @property
    def directory(self) -> Path:
        return self._given_directory or self._sockets

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process exists. A paused one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Return when the server serves. ServerFailed if it does not; then nothing is left behind."""
        if self.running:
            return self
        self._started_by = os.getpid()
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        try:
            self._home = self._home or Path(tempfile.mkdtemp(prefix="fencing-", dir=_scratch()))
            self.directory.mkdir(parents=True, exist_ok=True)
            self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server in good order, or kill it if that takes too long. Private data are removed."""
        if os.getpid() != self._started_by:
            self._let_go()
            return
        self._end()
        atexit.unregister(self.stop)
        self._release_port()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def restart(self) -> Self:
        """End the server in good order and start it again on the data it has saved."""
        self._end()
        return self.start()

    def pause(self) -> None:
        """Return when the server and all its children stand still (SIGSTOP). Connections stay open."""
        if self._process is not None and self.running:
            processes.pause(self._process.pid)

    def resume(self) -> None:
        """Undo `pause`."""
        if self._process is not None and self.running:
            processes.resume(self._process.pid)

    def kill(self) -> None:
        """Return when the server and all its children are gone (SIGKILL). What was saved stays.

        Safe because it waits for the children too: PostgreSQL does not start on data whose shared memory
        somebody is still attached to.
        """
        if self._process is not None and self.running:
            processes.kill(self._process.pid, self._process.wait)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _sockets(self) -> Path:
        if self._home is None:
            raise ServerFailed("the server has no directory before start() and after stop()")
        return self._home

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _launch(self) -> None:
        """Start the process and wait for its answer; on another port if ours was snatched away."""
        attempts = 1 if self.port else 5
        while True:
            attempts -= 1
            self._reserve_port()
            with self._log.open("ab") as log:
                before = log.tell()
                self._process = self._popen(self._command(), stdout=log)
            if (
                processes.wait_until(lambda: not self.running or self._answers(), START_LIMIT)
                and self.running
            ):
                return
            said = self._log.read_bytes()[before:].decode(errors="replace")
            if not attempts or "Address already in use" not in said:
                fate = f"did not answer in {START_LIMIT:.0f} s" if self.running else "ended at once"
                tail = "\n".join(said.splitlines()[-20:])
                raise ServerFailed(f"{self._command()[0]} on port {self.port} {fate}. Its log:\n{tail}")
            self._release_port()
            self.port = 0

    def _popen(self, command: list[str], *, stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """The command in a session of its own (Ctrl-C does not reach it), as `_user` if there is one."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            cwd=self._sockets,
            env={**inherited, "LC_ALL": "C"},
            start_new_session=True,
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            extra_groups=[] if self._user else None,
        )

    def _let_go(self) -> None:
        """In a forked child: close what was inherited, without a word to the server."""
        self._release_port()
        if self._process is not None:
            self._process.poll()  # learns that it is no child of ours, and stops minding it

    def _end(self) -> None:
        if self._process is None or not self.running:
            return
        self.resume()
        self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()

    def _reserve_port(self) -> None:
        """Pick a port if none is known yet, and on Linux hold on to it while the server is down.

        Safe because a socket that is bound but does not listen lets the server bind beside it (both set
        SO_REUSEADDR) while the kernel gives the port to nobody else: to no search for a free port and to
        no outgoing connection. Clients that connect while the server is down are refused, as they should.
        """
        if self._reservation is not None:
            return
        reservation = socket.socket()
        try:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind((self.host, self.port))
        except OSError as error:
            reservation.close()
            raise ServerFailed(f"port {self.port} is taken: {error}") from error
        self.port = int(reservation.getsockname()[1])
        if sys.platform == "linux":
            self._reservation = reservation
        else:
            reservation.close()

    def _release_port(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None


def package_directory(package: str) -> Path:
    """Where an installed package lies, found without importing it. ConfigurationError if it is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(f'{package} is not installed: pip install "fencing[embedded]"')
    return Path(spec.submodule_search_locations[0])


def version_of(program: Path) -> str:
    """What ``program --version`` says, only the number."""
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    number = re.search(r"\d+(\.\d+)+", said)
    return number[0] if number else said.strip()


def _scratch() -> Path:
    """Where private directories go: the usual place, if it suits sockets and servers of other users."""
    usual = Path(tempfile.gettempdir()).resolve()
    short = len(str(usual)) <= 50  # the path of a socket has room for about 100 characters
    open_to_all = all(part.stat().st_mode & 0o001 for part in (usual, *usual.parents))
    return usual if short and (open_to_all or os.geteuid() != 0) else Path("/tmp")
