"""Both twins behind one plain face, so that a scenario on real servers is told once and run for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import redis
import redis.asyncio

from fencing import AsyncLeases, Leases
from fencing.events import Event


class Recorder:
    """An observer that keeps what it saw, and lets a test wait for more."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def observe(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[Event]) -> list[Any]:
        with self._changed:
            return [event for event in self.events if type(event) is kind]

    def wait_for(self, kind: type[Event], count: int = 1, timeout: float = 10.0) -> list[Any]:
        def seen() -> list[Any]:
            return [event for event in self.events if type(event) is kind]

        with self._changed:
            if not self._changed.wait_for(lambda: len(seen()) >= count, timeout):
                raise TimeoutError(f"{len(seen())} of {count} {kind.__name__} seen: {self.events}")
            return seen()


class SyncSide:
    """`Leases` as they are."""

    name = "sync"

    def __init__(self, url: str, namespace: str, **options: Any) -> None:
        self.recorder = Recorder()
        self._client = redis.Redis.from_url(url)
        self.leases = Leases(self._client, namespace=namespace, observers=[self.recorder.observe], **options)

    def do(self, result: Any) -> Any:
        return result

    def acquire(self, resource: str, **options: Any) -> Any:
        return self.leases.acquire(resource, **options)

    def try_acquire(self, resource: str, **options: Any) -> Any:
        return self.leases.try_acquire(resource, **options)

    def peek(self, resource: str) -> Any:
        return self.leases.peek(resource)

    def release(self, lease: Any) -> None:
        lease.release()

    def renew(self, lease: Any) -> None:
        lease.renew()

    def leave(self, lease: Any) -> None:
        lease.__exit__(None, None, None)

    def close(self) -> None:
        self.leases.close()
        self._client.close()


class AsyncSide:
    """`AsyncLeases` on an event loop in a thread of its own."""

    name = "async"

    def __init__(self, url: str, namespace: str, **options: Any) -> None:
        self.recorder = Recorder()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = redis.asyncio.Redis.from_url(url)

        async def make() -> AsyncLeases:
            return AsyncLeases(
                self._client, namespace=namespace, observers=[self.recorder.observe], **options
            )

        self.leases = self.do(make())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def acquire(self, resource: str, **options: Any) -> Any:
        async def take() -> Any:
            return await self.leases.acquire(resource, **options)

        return self.do(take())

    def try_acquire(self, resource: str, **options: Any) -> Any:
        return self.do(self.leases.try_acquire(resource, **options))

    def peek(self, resource: str) -> Any:
        return self.do(self.leases.peek(resource))

    def release(self, lease: Any) -> None:
        self.do(lease.release())

    def renew(self, lease: Any) -> None:
        self.do(lease.renew())

    def leave(self, lease: Any) -> None:
        self.do(lease.__aexit__(None, None, None))

    def close(self) -> None:
        async def close() -> None:
            await self.leases.aclose()
            await self._client.aclose()

        self.do(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Side = SyncSide | AsyncSide
SIDES = (SyncSide, AsyncSide)
