"""Uncontended acquire + release: ours (with a token) against redis-py's Lock (without one) and a bare socket."""

from __future__ import annotations

import asyncio
import socket

import hiredis
import redis
import redis.asyncio

from benchmarks.measuring import compare, compare_async, pin, table, unpin
from fencing import AsyncLeases, Leases
from fencing.backends.base import Acquire, Release
from fencing.backends.wire import pack, pack_target
from fencing.embedded import RedisServer
from fencing.token import new_holder

CYCLES = 500


def run() -> None:
    with RedisServer() as server:
        assert server.pid is not None
        print(f"\n## Acquire + release, uncontended ({pin(server.pid)})")
        sync(server)
        asyncio.run(asynchronous(server))
        unpin()


def sync(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        leases = Leases(client, namespace="bench")

        def ours() -> None:
            with leases.acquire("job:1", ttl=30):
                pass

        def native() -> None:
            lock = client.lock("native", timeout=30)
            lock.acquire()
            lock.release()

        def native_with_token() -> None:
            lock = client.lock("native", timeout=30)
            lock.acquire()
            client.incr("token")
            lock.release()

        variants = {
            "fencing": ours,
            "fencing (A/A)": ours,
            "redis-py Lock, no token": native,
            "redis-py Lock + INCR": native_with_token,
            "bare socket, same commands": bare(server),
        }
        for call in variants.values():
            call()
        table("Threads", compare(variants, CYCLES), "redis-py Lock, no token")
        leases.close()


def bare(server: RedisServer):  # type: ignore[no-untyped-def]
    """The least a Python client can do: a blocking socket, the packed commands, a C parser."""
    sock = socket.create_connection((server.host, server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = hiredis.Reader()
    target = pack_target("bench", ("job:2",), 1)
    holder = new_holder()
    acquire = pack(Acquire(target, holder, "bench", 30_000))
    release = pack(Release(target, holder))

    def cycle() -> None:
        for command in (acquire, release):
            sock.sendall(command)
            reader.feed(sock.recv(65536))
            assert reader.gets()[0] in (b"granted", b"done")

    return cycle


async def asynchronous(server: RedisServer) -> None:
    async with (
        redis.asyncio.Redis.from_url(server.url) as client,
        AsyncLeases(client, namespace="bench") as leases,
    ):

        async def ours() -> None:
            async with leases.acquire("job:1", ttl=30):
                pass

        async def native() -> None:
            lock = client.lock("native", timeout=30)
            await lock.acquire()
            await lock.release()

        variants = {"fencing": ours, "fencing (A/A)": ours, "redis.asyncio Lock, no token": native}
        for call in variants.values():
            await call()
        table("asyncio", await compare_async(variants, CYCLES), "redis.asyncio Lock, no token")
