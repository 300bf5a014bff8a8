"""One renewer and few connections for a process, however many leases and namespaces it has."""

from __future__ import annotations

import threading

import pytest
import redis
from faults.conftest import wait_until
from faults.test_renewal_failures import address
from harness.sides import Recorder

import fencing.renewal
from fencing import Leases
from fencing.events import Renewed


def renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fencing-renewer"]


def test_leases_of_several_namespaces_on_one_client_share_a_thread_and_renew_in_batches(
    redis_url: str, namespace: str, proxy
) -> None:
    line = proxy(*address(redis_url))
    before = set(renewers())
    recorder = Recorder()
    with redis.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as client:
        one = Leases(client, namespace=f"{namespace}-1", observers=[recorder.observe])
        two = Leases(client, namespace=f"{namespace}-2", observers=[recorder.observe])
        leases = [issuer.acquire(f"job:{n}", ttl=0.9) for n in range(20) for issuer in (one, two)]
        recorder.wait_for(Renewed, 80)
        assert len(set(renewers()) - before) == 1
        assert line.connections <= 2, "one for the caller, one for the renewer"
        for lease in leases:
            lease.check()
        one.close()
        two.close()


def test_connections_are_given_back_and_the_thread_ends_when_nothing_happens(
    redis_url: str, namespace: str, proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing.renewal, "IDLE", 0.05)
    before = set(renewers())
    line = proxy(*address(redis_url))
    with redis.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as client:
        leases = Leases(client, namespace=namespace)
        leases.acquire("job:1", ttl=1).release()
        leases.peek("job:1")
        wait_until(lambda: not leases.backend._idle)
        wait_until(lambda: not set(renewers()) - before)
        leases.acquire("job:1", ttl=1).release()
        leases.close()


def test_a_dead_backend_does_not_hold_up_the_leases_of_another(redis_url: str, namespace: str, proxy) -> None:
    line = proxy(*address(redis_url))
    recorder = Recorder()
    with (
        redis.Redis.from_url(f"redis://127.0.0.1:{line.port}/0") as lost,
        redis.Redis.from_url(redis_url) as healthy,
    ):
        stuck = Leases(lost, namespace=namespace, observers=[])
        alive = Leases(healthy, namespace=namespace, observers=[recorder.observe])
        stuck.acquire("stuck", ttl=18)
        line.deaf()
        lease = alive.acquire("alive", ttl=0.3)
        recorder.wait_for(Renewed, 10)
        lease.check()
        line.heal()
        alive.close()
        stuck.close()
