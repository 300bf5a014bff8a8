"""Stopped from outside, at any moment: what was got is given back, and a release is not interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import redis
import redis.asyncio
from faults.conftest import wait_until
from faults.test_renewal_failures import address

from fencing import AsyncLeases, LeaseLost, Leases
from fencing.events import GivenBack


async def cancel_after(steps: int, work: Coroutine[Any, Any, Any]) -> bool:
    """Run the work for so many turns of the event loop, then cancel it; whether it was over before."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
        if task.done():
            break
    over = task.done()
    task.cancel()
    await asyncio.wait([task])
    return over


def test_acquire_cancelled_at_any_await_leaves_no_lease_behind(redis_url: str, namespace: str) -> None:
    async def scenario() -> int:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncLeases(client, namespace=namespace, observers=[]) as leases:
                await leases.peek("job")  # connect and join first: cancel what comes after
                for steps in range(200):
                    resource = f"job:{steps}"

                    async def acquire(resource: str = resource) -> None:
                        lease = await leases.acquire(resource, ttl=30)
                        await lease.release()

                    over = await cancel_after(steps, acquire())
                    assert await leases.peek(resource) is None, f"cancelled after {steps} steps"
                    assert leases.gate.held_by(resource) is None
                    again = await leases.acquire(resource, wait=0.0)
                    await again.release()
                    if over:
                        return steps
        raise AssertionError("the work was never over")

    assert asyncio.run(scenario()) > 2, "there was something to cancel"


def test_block_cancelled_at_any_await_is_released(redis_url: str, namespace: str) -> None:
    async def scenario() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncLeases(client, namespace=namespace, observers=[]) as leases:
                await leases.peek("job")
                for steps in range(200):
                    resource = f"job:{steps}"

                    async def work(resource: str = resource) -> None:
                        async with leases.acquire(resource, ttl=30):
                            await asyncio.sleep(0)

                    over = await cancel_after(steps, work())
                    assert await leases.peek(resource) is None, f"cancelled after {steps} steps"
                    if over:
                        return

    asyncio.run(scenario())


def test_acquire_cancelled_while_waiting_behind_a_slow_line_gives_back(
    redis_url: str, namespace: str, proxy
) -> None:
    line = proxy(*address(redis_url))
    seen: list[GivenBack] = []

    async def scenario() -> None:
        async with redis.asyncio.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as client:
            async with AsyncLeases(client, namespace=namespace, observers=[seen.append]) as leases:
                await leases.peek("job:1")
                line.delay(0.1)
                task = asyncio.ensure_future(leases.acquire("job:1", ttl=30).__aenter__())
                line.clear()
                await asyncio.to_thread(line.wait_for_commands, 1)
                task.cancel()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                line.heal()
                assert await leases.peek("job:1") is None

    asyncio.run(scenario())
    assert [event.cause for event in seen if type(event) is GivenBack] == ["CancelledError"]


def test_ctrl_c_during_acquire_gives_back(redis_url: str, namespace: str, proxy) -> None:
    line = proxy(*address(redis_url))
    seen: list[Any] = []
    with redis.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as client:
        leases = Leases(client, namespace=namespace, observers=[seen.append])
        leases.peek("job:1")
        line.delay(0.2)
        line.clear()

        def interrupt() -> None:
            line.wait_for_commands(1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            leases.acquire("job:1", ttl=30)
        thread.join()
        line.heal()
        assert leases.peek("job:1") is None
        assert [event.cause for event in seen if type(event) is GivenBack] == ["KeyboardInterrupt"]
        leases.acquire("job:1", wait=0).release()
        leases.close()


def test_losing_the_lease_cancels_the_task_with_the_reason(redis_url: str, namespace: str) -> None:
    async def scenario() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncLeases(client, namespace=namespace, observers=[]) as leases:
                with pytest.raises(LeaseLost) as lost:
                    async with leases.acquire("job:1", ttl=0.3):
                        await client.delete(f"fencing:1:{{{namespace}/0}}:lease:job:1")
                        await asyncio.Event().wait()
                assert lost.value.reason == "expired"
                assert isinstance(lost.value.__cause__, asyncio.CancelledError)
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0, "as asyncio.timeout leaves it"

    asyncio.run(scenario())


def test_threads_wait_in_memory_while_one_of_them_asks(redis_url: str, namespace: str, proxy) -> None:
    line = proxy(*address(redis_url))
    with (
        redis.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as client,
        redis.Redis.from_url(redis_url) as other,
        Leases(client, namespace=namespace) as leases,
        Leases(other, namespace=namespace) as elsewhere,
    ):
        leases.peek("job:1")
        blocker = elsewhere.acquire("job:1", ttl=30)
        done: list[int] = []

        def work(number: int) -> None:
            with leases.acquire("job:1", ttl=30, wait=20):
                done.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda n=number: leases.gate.waiting("job:1") == n)
        before = line.connections
        blocker.release()
        for thread in threads:
            thread.join()
        assert done == list(range(8)), "first come, first served"
        assert line.connections == before, "seven of them asked nobody"
