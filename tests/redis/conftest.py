"""A Redis of their own for these tests: they flush scripts, set passwords and use up the memory.

This folder must not become a package: it would be found where ``import redis`` looks for the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from contract.subjects import BackgroundLoop, InRedis, Subject
from harness.plugin import started
from harness.proxy import Proxy
from harness.sides import SIDES, Side

from fencing.backends.redis import AsyncRedisBackend, RedisBackend
from fencing.embedded import RedisServer

MakeSubject = Callable[..., Subject]
MakeSide = Callable[..., Side]


@pytest.fixture(scope="session")
def background_loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


@pytest.fixture(scope="session")
def running_server() -> Iterator[RedisServer]:
    with contextlib.ExitStack() as servers:
        yield started(servers, RedisServer())


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    """A Redis without data, scripts, or users beside the default one."""
    with redis.Redis.from_url(running_server.url) as client:
        client.flushall()
        client.script_flush()
        client.execute_command("ACL", "LOG", "RESET")
        for user in client.acl_users():
            if user != "default":
                client.acl_deluser(user)
    return running_server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """A client of the server that may do everything."""
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def line(server: RedisServer, proxy: Callable[..., Proxy]) -> Proxy:
    """The way to the server, where commands and connections are counted."""
    return proxy(server.host, server.port, resp=True)


@pytest.fixture
def line_url(line: Proxy) -> str:
    return f"redis://{line.host}:{line.port}/0"


@pytest.fixture
def sync_subject(admin: redis.Redis, namespace: str) -> Iterator[MakeSubject]:
    """Makes a `RedisBackend` behind the contract's face, with a client of your options."""
    with contextlib.ExitStack() as opened:

        def make(url: str, *, shards: int = 1, namespace: str = namespace, **options: Any) -> Subject:
            client = opened.enter_context(redis.Redis.from_url(url, **options))
            backend = RedisBackend(client, shards=shards)
            opened.callback(backend.close)
            return Subject(backend, InRedis(admin, namespace), namespace)

        yield make


@pytest.fixture
def async_subject(
    admin: redis.Redis, namespace: str, background_loop: BackgroundLoop
) -> Iterator[MakeSubject]:
    """Makes an `AsyncRedisBackend` behind the contract's face, with a client of your options."""
    finish = background_loop.finish
    with contextlib.ExitStack() as opened:

        def make(url: str, *, shards: int = 1, namespace: str = namespace, **options: Any) -> Subject:
            client = redis.asyncio.Redis.from_url(url, **options)
            backend = AsyncRedisBackend(client, shards=shards)
            opened.callback(lambda: finish(client.aclose()))
            opened.callback(lambda: finish(backend.close()))
            return Subject(backend, InRedis(admin, namespace), namespace, finish)

        yield make


@pytest.fixture(params=["sync", "async"])
def make_subject(request: pytest.FixtureRequest) -> MakeSubject:
    """Makes a backend of either kind behind the contract's face."""
    make: MakeSubject = request.getfixturevalue(f"{request.param}_subject")
    return make


@pytest.fixture
def subject(make_subject: MakeSubject, server: RedisServer) -> Subject:
    """A backend of either kind on the server."""
    return make_subject(server.url)


@pytest.fixture(params=SIDES, ids=lambda kind: kind.name)
def make_side(request: pytest.FixtureRequest, namespace: str) -> Iterator[MakeSide]:
    """Makes `Leases` or `AsyncLeases`, whichever the test is run for, behind one face."""
    with contextlib.ExitStack() as opened:

        def make(url: str, **options: Any) -> Side:
            return opened.enter_context(contextlib.closing(request.param(url, namespace, **options)))

        yield make
