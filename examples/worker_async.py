"""The same worker for asyncio: when the lease is lost, the task inside is cancelled and the block raises.

python examples/worker_async.py redis://localhost:6379/0 job:1
"""

import asyncio
import signal
import sys

import redis.asyncio

from fencing import AsyncLeases, LeaseLost, LeaseUnavailable


async def work(url: str, resource: str) -> None:
    client = redis.asyncio.Redis.from_url(url)
    async with client, AsyncLeases(client, namespace="examples") as leases:
        try:
            async with leases.acquire(resource, ttl=30) as lease:
                print(f"working on {resource} with token {lease.token}", flush=True)
                await asyncio.Event().wait()
        except LeaseUnavailable as busy:
            print(busy)
        except LeaseLost as lost:
            print(f"stop: {lost}")


async def main(url: str, resource: str) -> None:
    job = asyncio.create_task(work(url, resource))
    for number in (signal.SIGTERM, signal.SIGINT):
        # Cancelling the task unwinds its blocks; release survives the cancellation.
        asyncio.get_running_loop().add_signal_handler(number, job.cancel)
    try:
        await job
    except asyncio.CancelledError:
        print("stopped")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2]))
