"""Forks, exits and signals: a process gives back what is its own, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from fencing import Leases

EXAMPLES = Path(__file__).parents[2] / "examples"

FORK = """
import json, os, sys, threading, redis
from fencing import Leases, FencingError, LeaseLost
from fencing.events import Renewed
url, namespace = sys.argv[1:]
renewed = threading.Event()
def observer(event):
    if type(event) is Renewed:
        renewed.set()
leases = Leases(redis.Redis.from_url(url), namespace=namespace, observers=[observer])
read, write = os.pipe()
with leases.acquire("job:1", ttl=0.9) as lease:
    pid = os.fork()
    if pid == 0:
        out = {"lost": lease.lost.reason, "held": lease.held}
        for verb in ("check", "renew", "release"):
            try:
                getattr(lease, verb)()
                out[verb] = "ok"
            except FencingError as error:
                out[verb] = type(error).__name__
        out["renewer's leases"] = len(leases._renewer.leases())
        out["parent's"] = leases.try_acquire("job:1") is None
        with leases.acquire("job:2") as own:
            out["own"] = own.held
        os.write(write, json.dumps(out).encode())
        sys.exit(0)  # unwinds the with block of the parent's lease, in the child
    child = json.loads(os.read(read, 65536))
    _, status = os.waitpid(pid, 0)
    renewed.clear()
    child["parent renews"] = renewed.wait(5)
    child["parent holds"] = leases.peek("job:1").holder == lease.holder
    lease.check()
    child["status"] = status
print(json.dumps(child))
"""


def test_forked_child_never_renews_or_releases_its_parents_lease(
    script, redis_url: str, namespace: str
) -> None:
    process = script(FORK, redis_url, namespace)
    out, err = process.communicate(timeout=30)
    assert json.loads(out or "null") == {
        "lost": "unknown",
        "held": False,
        "check": "LeaseLost",
        "renew": "LeaseLost",
        "release": "LeaseLost",
        "renewer's leases": 0,
        "parent's": True,
        "own": True,
        "parent renews": True,
        "parent holds": True,
        "status": 0,
    }, err


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_interpreter_exit_does_not_hang_while_a_lease_is_held(
    script, redis_url: str, namespace: str, kind: str
) -> None:
    sync = (
        "import sys, redis, fencing\n"
        "leases = fencing.Leases(redis.Redis.from_url(sys.argv[1]), namespace=sys.argv[2])\n"
        "lease = leases.acquire('job:1', ttl=30)\n"
    )
    asynchronous = (
        "import asyncio, sys, redis.asyncio, fencing\n"
        "async def main():\n"
        "    client = redis.asyncio.Redis.from_url(sys.argv[1])\n"
        "    leases = fencing.AsyncLeases(client, namespace=sys.argv[2])\n"
        "    lease = await leases.acquire('job:1', ttl=30)\n"
        "    await leases.aclose()\n"
        "    await client.aclose()\n"
        "asyncio.run(main())\n"
    )
    process = script(sync if kind == "sync" else asynchronous, redis_url, namespace)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("example", ["worker.py", "worker_async.py"])
def test_signal_unwinds_the_examples_and_releases(
    redis_url: str, redis_client, example: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / example), redis_url, f"job:{example}:{number}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "working" in process.stdout.readline()
        with Leases(redis_client, namespace="examples") as leases:
            assert leases.peek(f"job:{example}:{number}") is not None
            process.send_signal(number)
            _, err = process.communicate(timeout=10)
            assert leases.peek(f"job:{example}:{number}") is None, err
        assert process.returncode in (0, 128 + number, -number, 130), err
    finally:
        process.kill()
        process.communicate()


def test_threads_of_several_processes_exclude_each_other(script, redis_url: str, namespace: str) -> None:
    """4 processes x 4 threads x 10 read-modify-writes without any other protection."""
    source = (
        "import sys, threading, redis, fencing\n"
        "client = redis.Redis.from_url(sys.argv[1])\n"
        "leases = fencing.Leases(client, namespace=sys.argv[2])\n"
        "def work():\n"
        "    for _ in range(10):\n"
        "        with leases.acquire('counter', ttl=10, wait=30):\n"
        "            value = int(client.get(sys.argv[2]) or 0)\n"
        "            client.set(sys.argv[2], value + 1)\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    workers = [script(source, redis_url, namespace) for _ in range(4)]
    for worker in workers:
        _, err = worker.communicate(timeout=50)
        assert worker.returncode == 0, err
    with redis.Redis.from_url(redis_url) as client:
        assert int(client.get(namespace) or 0) == 160
        client.delete(namespace)
