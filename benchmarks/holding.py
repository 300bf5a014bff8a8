"""What it costs to hold leases: memory a lease, and CPU to renew thousands of them."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc

import redis
import redis.asyncio

from fencing import AsyncLeases, Leases
from fencing.embedded import RedisServer

LEASES = 5000
TTL = 30.0
SECONDS = 22.0  # two rounds of renewals


def run() -> None:
    with RedisServer() as server:
        print(f"\n## Holding {LEASES} leases at ttl {TTL:.0f} s\n")
        print("| | bytes a lease | CPU, all threads, of one core |")
        print("|---|---|---|")
        report("threads", *threads(server))
        report("asyncio", *asyncio.run(tasks(server)))


def report(kind: str, size: float, share: float) -> None:
    print(f"| {kind} | {size:.0f} | {share:.2%} |")


def threads(server: RedisServer) -> tuple[float, float]:
    with redis.Redis.from_url(server.url) as client:
        leases = Leases(client, namespace="bench-threads", observers=[])
        leases.acquire("warm up").release()
        before = traced()
        held = [leases.acquire(f"job:{n}", ttl=TTL) for n in range(LEASES)]
        size = (traced() - before) / LEASES
        tracemalloc.stop()
        began = time.process_time()
        time.sleep(SECONDS)
        share = (time.process_time() - began) / SECONDS
        for lease in held:
            lease.check()
        leases.close()
        return size, share


async def tasks(server: RedisServer) -> tuple[float, float]:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        async with AsyncLeases(client, namespace="bench-tasks", observers=[]) as leases:
            await (await leases.acquire("warm up")).release()
            before = traced()
            held = [await leases.acquire(f"job:{n}", ttl=TTL) for n in range(LEASES)]
            size = (traced() - before) / LEASES
            tracemalloc.stop()
            began = time.process_time()
            await asyncio.sleep(SECONDS)
            share = (time.process_time() - began) / SECONDS
            for lease in held:
                lease.check()
        return size, share


def traced() -> int:
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
