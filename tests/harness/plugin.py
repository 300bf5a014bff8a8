"""The fixtures that give a test its servers, and the hooks that share them between xdist's workers."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import psycopg
import pytest
from psycopg import sql
from redis import Redis
from sqlalchemy import make_url

from fencing.embedded import PostgresServer, RedisServer
from fencing.errors import ConfigurationError
from harness.mariadb import MariaDBServer, empty_database
from harness.proxy import Proxy
from harness.servers import Kind, RemoteServers, Servers, Unavailable

SERVERS: pytest.StashKey[Servers | RemoteServers] = pytest.StashKey()
WORKER_INPUT = "fencing_servers"

Server = TypeVar("Server", RedisServer, PostgresServer, MariaDBServer)


def pytest_configure(config: pytest.Config) -> None:
    worker_input = getattr(config, "workerinput", None)
    config.stash[SERVERS] = Servers() if worker_input is None else RemoteServers(worker_input[WORKER_INPUT])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:  # xdist's; in the controller, before each worker starts
    node.workerinput[WORKER_INPUT] = node.config.stash[SERVERS].address_for_workers()


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [] if config.option.collectonly else config.stash[SERVERS].describe()


def pytest_unconfigure(config: pytest.Config) -> None:
    if servers := config.stash.get(SERVERS, None):
        servers.stop()


def do_without(reason: object) -> NoReturn:
    """A server is missing: a reason to skip on somebody's machine, but never to pass unnoticed in CI."""
    if os.environ.get("CI"):
        pytest.fail(str(reason), pytrace=False)
    pytest.skip(str(reason))


def shared_url(config: pytest.Config, kind: Kind) -> str:
    try:
        return config.stash[SERVERS].url(kind)
    except Unavailable as reason:
        do_without(reason)


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> str:
    """A Redis that all tests share: keep to your own `namespace`, and stop or flush nothing."""
    return shared_url(pytestconfig, "redis")


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    """A client of the shared Redis."""
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def make_redis() -> Iterator[Callable[..., RedisServer]]:
    """Start a Redis of your own, as often as you call it. Takes what `RedisServer` takes."""
    with contextlib.ExitStack() as servers:
        yield lambda *args, **options: started(servers, RedisServer(*args, **options))


@pytest.fixture
def private_redis(make_redis: Callable[..., RedisServer]) -> RedisServer:
    """A Redis of your own, to pause, kill and restart."""
    return make_redis()


@pytest.fixture(scope="session")
def postgres_url(pytestconfig: pytest.Config) -> str:
    """A PostgreSQL that all tests share, by the url of its superuser's database."""
    return shared_url(pytestconfig, "postgres")


@pytest.fixture
def database_url(postgres_url: str) -> Iterator[str]:
    """An empty database of your own on the shared PostgreSQL."""
    url = make_url(postgres_url)
    name = f"test_{uuid.uuid4().hex}"
    administration = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with contextlib.closing(psycopg.connect(administration, autocommit=True)) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield url.set(database=name).render_as_string(hide_password=False)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def make_postgres() -> Iterator[Callable[..., PostgresServer]]:
    """Start a PostgreSQL of your own, as often as you call it. Takes what `PostgresServer` takes."""
    with contextlib.ExitStack() as servers:
        yield lambda *args, **options: started(servers, PostgresServer(*args, **options))


@pytest.fixture
def private_postgres(make_postgres: Callable[..., PostgresServer]) -> PostgresServer:
    """A PostgreSQL of your own, to pause, kill and restart."""
    return make_postgres()


@pytest.fixture(scope="session")
def mariadb_url(pytestconfig: pytest.Config) -> str:
    """A MariaDB that all tests share, by the url of its administrator."""
    return shared_url(pytestconfig, "mariadb")


@pytest.fixture
def mariadb_database_url(mariadb_url: str) -> Iterator[str]:
    """An empty database of your own on the shared MariaDB."""
    with empty_database(mariadb_url) as url:
        yield url


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    """Put a `Proxy` in front of a server: ``proxy(host, port, resp=True)``."""
    with contextlib.ExitStack() as proxies:
        yield lambda *address, **options: proxies.enter_context(Proxy(*address, **options))


def started(servers: contextlib.ExitStack, server: Server) -> Server:
    try:
        return servers.enter_context(server)
    except ConfigurationError as reason:
        do_without(reason)
