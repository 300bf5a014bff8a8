"""A holder that overslept: its release and its renewal are refused, and the next holder keeps the lease."""

from __future__ import annotations

import json
import signal

import pytest
from faults.conftest import MakeSide, wait_until

from fencing import LeaseLost, LeaseNotHeld
from fencing.events import NotHeld

# One process that holds a lease and, told to, goes on as if nothing had happened.
HOLDER = """
import json, sys, redis
from fencing import Leases, FencingError
url, namespace = sys.argv[1:]
leases = Leases(redis.Redis.from_url(url), namespace=namespace, label="sleeper")
lease = leases.acquire("job:1", ttl=0.6)
print(json.dumps({"token": lease.token}), flush=True)
sys.stdin.readline()
def outcome(verb):
    try:
        verb()
    except FencingError as error:
        return [type(error).__name__, getattr(error, "reason", None)]
    return ["ok", None]
print(json.dumps({
    "raw renew": outcome(lambda: lease._end_renew(
        leases.backend.ask(lease._renew_command(None), 2.0), 0.0, None)),
    "renew": outcome(lease.renew),
    "check": outcome(lease.check),
    "release": outcome(lease.release),
}), flush=True)
"""


def test_expired_holder_can_neither_release_nor_renew(make_side: MakeSide, redis_url: str) -> None:
    sleeper, successor = make_side(redis_url), make_side(redis_url)
    stale = sleeper.acquire("job:1", ttl=0.1, hold_to_ttl=True)
    lease = successor.acquire("job:1", ttl=10, wait=5)
    assert lease.token > stale.token

    with pytest.raises(LeaseLost) as lost:
        stale.check()
    assert lost.value.reason == "expired"
    with pytest.raises(LeaseLost):
        sleeper.renew(stale)
    with pytest.raises(LeaseNotHeld) as refused:
        sleeper.release(stale)
    assert refused.value.held_by.holder == lease.holder
    assert [event.verb for event in sleeper.recorder.of(NotHeld)] == ["release"]

    held_by = successor.peek("job:1")
    assert (held_by.holder, held_by.token) == (lease.holder, lease.token)
    successor.release(lease)


def test_frozen_holder_behind_a_slow_line_is_refused_when_it_wakes(
    make_side: MakeSide, redis_url: str, namespace: str, script, proxy
) -> None:
    """SIGSTOP past the TTL and a network delay, both at once."""
    successor = make_side(redis_url)
    host, port = redis_url.removeprefix("redis://").partition("/")[0].split(":")
    line = proxy(host, int(port))
    sleeper = script(HOLDER, f"redis://127.0.0.1:{line.port}/0", namespace)
    stale_token = json.loads(sleeper.stdout.readline())["token"]
    line.delay(0.15)
    sleeper.send_signal(signal.SIGSTOP)

    lease = successor.acquire("job:1", ttl=30, wait=10)
    assert lease.token > stale_token

    sleeper.send_signal(signal.SIGCONT)
    sleeper.stdin.write("go\n")
    sleeper.stdin.flush()
    outcomes = json.loads(sleeper.stdout.readline())
    assert outcomes["raw renew"][0] == "LeaseNotHeld"
    assert outcomes["renew"][0] == "LeaseLost"
    assert outcomes["check"][0] == "LeaseLost"
    assert outcomes["release"][0] == "LeaseNotHeld"

    held_by = successor.peek("job:1")
    assert (held_by.holder, held_by.token) == (lease.holder, lease.token)
    successor.release(lease)
    wait_until(lambda: successor.peek("job:1") is None)
