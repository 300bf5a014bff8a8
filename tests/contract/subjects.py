"""Every backend behind one synchronous face, so that one set of tests defines them all.

To add a backend: write the few lines that make a `Subject` of it, and give them a line in `SUBJECTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest
import redis
import redis.asyncio

from fencing.backends.base import (
    CALL_TIMEOUT,
    Acquire,
    AsyncBackend,
    Backend,
    Command,
    Granted,
    Peek,
    Release,
    Remint,
    Renew,
    Reply,
    Seen,
    Target,
)
from fencing.backends.redis import AsyncRedisBackend, RedisBackend
from fencing.backends.wire import PREFIX
from fencing.errors import FencingError
from fencing.testing import AsyncMemoryBackend, FakeClock, MemoryBackend
from fencing.token import HeldBy, new_holder

LONG = 60.0  # seconds: no test lasts until such a lease ends
SHORT = 0.03  # seconds: a lease to be waited out
MEDIUM = 0.25  # seconds: a lease to be renewed in time, and then waited out
DAY_US = 86_400 * 1_000_000
YEAR_US = 365 * DAY_US

T = TypeVar("T")


class Surroundings(Protocol):
    """What a backend lives in: a clock, and data that can be lost."""

    def now(self) -> float:
        """Seconds of the clock that `elapse` moves or waits for."""

    def wall_us(self) -> int:
        """The clock that tokens are lifted to, in microseconds."""

    def elapse(self, seconds: float) -> None: ...

    def forget(self) -> None:
        """Lose all data."""


class Taken(NamedTuple):
    """An acquire that was granted."""

    target: Target
    holder: str
    label: str
    token: int
    reply: Granted


class Subject:
    """A backend under test. `ask`, `ask_many` and `target` are its own; the others say a usual thing shortly."""

    def __init__(
        self,
        backend: Backend | AsyncBackend,
        surroundings: Surroundings,
        namespace: str,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        self.backend = backend
        self.namespace = namespace
        self.now = surroundings.now
        self.wall_us = surroundings.wall_us
        self.forget = surroundings.forget
        self._elapse = surroundings.elapse
        self._finish = finish

    def ask(self, command: Command, timeout: float = CALL_TIMEOUT) -> Reply:
        return self._finish(self.backend.ask(command, timeout))

    def ask_many(
        self, commands: Sequence[Command], timeout: float = CALL_TIMEOUT
    ) -> Sequence[Reply | FencingError]:
        return self._finish(self.backend.ask_many(commands, timeout))

    def target(self, *resources: str, namespace: str | None = None) -> Target:
        return self.backend.target(namespace or self.namespace, resources)

    def elapse_past(self, seconds: float) -> None:
        """Return when a bit more than this has passed."""
        self._elapse(seconds + 0.005)

    fresh_holder = staticmethod(new_holder)

    def acquire(
        self,
        *resources: str,
        holder: str | None = None,
        ttl: float = LONG,
        floor: int = 0,
        label: str = "",
        note: bool = True,
    ) -> Reply:
        target, ttl_ms = self.target(*resources), round(ttl * 1000)
        return self.ask(Acquire(target, holder or new_holder(), label, ttl_ms, floor, note))

    def take(self, *resources: str, holder: str | None = None, label: str = "", **how: Any) -> Taken:
        """Acquire, which must be granted."""
        holder = holder or new_holder()
        reply = self.acquire(*resources, holder=holder, label=label, **how)
        assert isinstance(reply, Granted), f"{resources} should be free: {reply}"
        return Taken(self.target(*resources), holder, label, reply.token, reply)

    def renew(self, *resources: str, holder: str, ttl: float = LONG) -> Reply:
        return self.ask(Renew(self.target(*resources), holder, round(ttl * 1000)))

    def release(self, *resources: str, holder: str) -> Reply:
        return self.ask(Release(self.target(*resources), holder))

    def remint(self, *resources: str, holder: str, floor: int) -> Reply:
        return self.ask(Remint(self.target(*resources), holder, floor))

    def peek(self, resource: str) -> HeldBy | None:
        reply = self.ask(Peek(self.target(resource)))
        assert isinstance(reply, Seen), reply
        return reply.held_by

    def is_free(self, resource: str) -> bool:
        return self.peek(resource) is None

    def abandoned(self, *resources: str, label: str = "", **how: Any) -> Taken:
        """A lease that has just run out."""
        taken = self.take(*resources, ttl=SHORT, label=label, **how)
        self.elapse_past(SHORT)
        return taken


def race(*rivals: Callable[[int], T], rounds: int) -> list[tuple[T, ...]]:
    """What the rivals, each in a thread, got in each round, which they began at the same moment."""
    start = threading.Barrier(len(rivals), timeout=10)

    def run(rival: Callable[[int], T]) -> list[T]:
        results = []
        for at in range(rounds):
            start.wait()
            results.append(rival(at))
        return results

    with ThreadPoolExecutor(len(rivals)) as threads:
        return list(zip(*threads.map(run, rivals), strict=True))


class InMemory:
    """A fake clock, and a dict."""

    def __init__(self, clock: FakeClock, backend: MemoryBackend) -> None:
        self.now = clock.now
        self.elapse = clock.advance
        self.forget = backend.forget
        self._clock = clock

    def wall_us(self) -> int:
        return int(self._clock.wall() * 1_000_000)


class InRedis:
    """Real time, and the keys of one namespace and those whose name begins with it."""

    now = staticmethod(time.monotonic)
    elapse = staticmethod(time.sleep)

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._pattern = f"{PREFIX}{{{namespace}*"

    def wall_us(self) -> int:
        seconds, rest = self._client.time()
        return seconds * 1_000_000 + rest

    def forget(self) -> None:
        if keys := list(self._client.scan_iter(self._pattern, count=10_000)):
            self._client.delete(*keys)


class BackgroundLoop:
    """An event loop in a thread of its own; `finish` is how other threads have a coroutine run."""

    def __enter__(self) -> BackgroundLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="contract-loop", daemon=True)
        self._thread.start()
        return self

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


Make = Callable[[pytest.FixtureRequest], contextlib.AbstractContextManager[Subject]]


def memory_subject(kind: type[MemoryBackend] = MemoryBackend) -> Subject:
    clock = FakeClock()
    backend = kind(clock)
    return Subject(backend, InMemory(clock, backend), "test")


@contextlib.contextmanager
def memory(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield memory_subject()


@contextlib.contextmanager
def async_memory(request: pytest.FixtureRequest) -> Iterator[Subject]:
    clock = FakeClock()
    backend = AsyncMemoryBackend(clock)
    finish = request.getfixturevalue("background_loop").finish
    yield Subject(backend, InMemory(clock, backend.sync), "test", finish)


@contextlib.contextmanager
def one_redis(request: pytest.FixtureRequest, **client_options: Any) -> Iterator[Subject]:
    url: str = request.getfixturevalue("redis_url")
    namespace = f"test-{uuid.uuid4().hex}"
    with redis.Redis.from_url(url, **client_options) as client, redis.Redis.from_url(url) as plain:
        backend, surroundings = RedisBackend(client), InRedis(plain, namespace)
        yield Subject(backend, surroundings, namespace)
        backend.close()
        surroundings.forget()


@contextlib.contextmanager
def one_async_redis(request: pytest.FixtureRequest, **client_options: Any) -> Iterator[Subject]:
    url: str = request.getfixturevalue("redis_url")
    namespace = f"test-{uuid.uuid4().hex}"
    finish = request.getfixturevalue("background_loop").finish
    client = redis.asyncio.Redis.from_url(url, **client_options)
    with redis.Redis.from_url(url) as plain:
        backend, surroundings = AsyncRedisBackend(client), InRedis(plain, namespace)
        yield Subject(backend, surroundings, namespace, finish)
        finish(backend.close())
        finish(client.aclose())
        surroundings.forget()


SUBJECTS: dict[str, Make] = {
    "memory": memory,
    "memory-async": async_memory,
    "redis-resp2": partial(one_redis, protocol=2),
    "redis-resp3-decoded": partial(one_redis, protocol=3, decode_responses=True),
    "redis-async-resp2": partial(one_async_redis, protocol=2),
    "redis-async-resp3": partial(one_async_redis, protocol=3),
}
