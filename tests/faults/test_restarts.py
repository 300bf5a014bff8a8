"""Redis goes away and comes back empty, with old data, or late: tokens still grow."""

from __future__ import annotations

import itertools
import time

import pytest
from faults.conftest import MakeSide
from harness.sides import Side

from fencing import BackendUnavailable, TokenRegression
from fencing.events import Lost, OrphanFound, Renewed, TokenRegressed
from fencing.testing import MemoryLedger


def tokens(side: Side, resource: str, count: int) -> list[int]:
    issued = []
    for _ in range(count):
        lease = side.acquire(resource, ttl=30)
        issued.append(lease.token)
        side.release(lease)
    return issued


def growing(issued: list[int]) -> bool:
    return all(before < after for before, after in itertools.pairwise(issued))


def test_tokens_grow_over_an_empty_restart(make_side: MakeSide, private_redis) -> None:
    side = make_side(private_redis.url)
    issued = tokens(side, "job:1", 20)
    private_redis.restart_empty()
    issued += tokens(side, "job:1", 20)
    assert growing(issued)


def test_tokens_grow_over_a_restart_with_old_data(make_side: MakeSide, private_redis) -> None:
    side = make_side(private_redis.url)
    issued = tokens(side, "job:1", 5)
    old = private_redis.snapshot()
    issued += tokens(side, "job:1", 20)
    private_redis.restart_with(old)
    issued += tokens(side, "job:1", 20)
    assert growing(issued)


def test_a_counter_that_starts_from_zero_would_repeat_tokens(make_side: MakeSide, private_redis) -> None:
    """The mutation that the two tests above convict: INCR without the lift."""
    import redis

    with redis.Redis.from_url(private_redis.url) as client:
        issued = [client.incr("counter") for _ in range(5)]
        private_redis.restart_empty()
        issued += [client.incr("counter") for _ in range(5)]
    assert not growing(issued)


def test_holder_learns_that_redis_forgot_it_and_the_next_token_is_higher(
    make_side: MakeSide, private_redis
) -> None:
    side = make_side(private_redis.url)
    lease = side.acquire("job:1", ttl=1.5)
    private_redis.restart_empty()
    [lost] = side.recorder.wait_for(Lost)
    assert lost.reason == "expired"
    assert side.acquire("job:1").token > lease.token


def test_lease_survives_a_restart_that_keeps_its_data(make_side: MakeSide, private_redis) -> None:
    side = make_side(private_redis.url)
    lease = side.acquire("job:1", ttl=6)
    private_redis.restart_with(private_redis.snapshot())
    side.recorder.wait_for(Renewed)
    lease.check()
    side.release(lease)


def test_dead_redis_is_an_error_at_once_and_a_frozen_one_within_the_bound(
    make_side: MakeSide, private_redis
) -> None:
    side = make_side(private_redis.url)
    side.release(side.acquire("job:1"))
    private_redis.pause()
    began = time.monotonic()
    with pytest.raises(BackendUnavailable):
        side.acquire("job:1", wait=0.1)
    assert time.monotonic() - began < 5
    private_redis.resume()
    private_redis.kill()
    began = time.monotonic()
    with pytest.raises(BackendUnavailable) as refused:
        side.try_acquire("job:1")
    assert time.monotonic() - began < 1
    assert not refused.value.sent


def test_takeover_of_a_dead_holder_tells_an_orphan(
    make_side: MakeSide, redis_url: str, script, namespace
) -> None:
    holder = script(
        "import sys, redis, fencing\n"
        "leases = fencing.Leases(redis.Redis.from_url(sys.argv[1]), namespace=sys.argv[2], label='dead-one')\n"
        "lease = leases.acquire('job:1', ttl=0.4)\n"
        "print(lease.token, flush=True)\n"
        "sys.stdin.readline()",
        redis_url,
        namespace,
    )
    token = int(holder.stdout.readline())
    holder.kill()
    side = make_side(redis_url)
    lease = side.acquire("job:1", wait=5)
    [orphan] = side.recorder.of(OrphanFound)
    assert (orphan.previous.label, orphan.previous.token) == ("dead-one", token)
    assert lease.token > token
    assert 0 <= orphan.unowned < 0.2, "taken over as soon as the TTL ran out"


def test_redis_behind_the_ledger_is_lifted_above_it(
    make_side: MakeSide, redis_url: str, namespace: str
) -> None:
    from faults.test_renewal_failures import with_ledger

    ledger = MemoryLedger()
    hour_ahead = int((time.time() + 3600) * 1_000_000)
    ledger.rows[namespace, "job:1"] = (hour_ahead, "f" * 32)
    side = with_ledger(make_side, redis_url, ledger)
    lease = side.acquire("job:1")
    assert lease.token == hour_ahead + 1
    assert ledger.rows[namespace, "job:1"] == (lease.token, lease.holder)
    [regressed] = side.recorder.of(TokenRegressed)
    assert regressed.ledger_token == hour_ahead
    assert regressed.refused_token < hour_ahead
    assert side.peek("job:1").token == lease.token
    side.release(lease)


def test_a_poisoned_ledger_does_not_spread(make_side: MakeSide, redis_url: str, namespace: str) -> None:
    from faults.test_renewal_failures import with_ledger

    ledger = MemoryLedger()
    ledger.rows[namespace, "job:1"] = (2**53 - 2, "f" * 32)
    side = with_ledger(make_side, redis_url, ledger)
    with pytest.raises(TokenRegression) as regression:
        side.acquire("job:1")
    assert regression.value.ledger_token == 2**53 - 2
    assert side.peek("job:1") is None, "the lease is given back"
    assert side.acquire("job:2").token < time.time() * 1_000_000 + 1_000_000


def test_a_server_that_was_demoted_is_not_asked_over_the_old_connection_again(
    make_side: MakeSide, make_redis
) -> None:
    import redis

    server, other = make_redis(), make_redis()
    side = make_side(server.url)
    side.release(side.acquire("job:1"))
    [old] = side.leases.backend._idle
    with redis.Redis.from_url(server.url) as admin:
        admin.replicaof(other.host, other.port)
        with pytest.raises(BackendUnavailable, match="READONLY"):
            side.acquire("job:1", wait=0)
        assert old not in side.leases.backend._idle
        admin.replicaof("NO", "ONE")
    side.release(side.acquire("job:1"))
