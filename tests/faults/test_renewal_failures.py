"""Renewal that fails: three times in a row is the end of it, and less is not."""

from __future__ import annotations

from typing import Any

import pytest
from faults.conftest import MakeSide, wait_until
from harness.sides import Side

from fencing import LeaseLost, LeaseNotHeld, Leases, Policy, Renewal, StaleToken
from fencing.events import Abandoned, LeftToExpire, Lost, RenewalFailed, RenewalStopped, Renewed
from fencing.testing import AsyncMemoryLedger, MemoryLedger

TTL = 1.2


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("redis://").partition("/")[0].split(":")
    return host, int(port)


@pytest.fixture(params=["cut", "deaf"])
def outage(request: pytest.FixtureRequest) -> str:
    """Connections are refused, or accepted and never answered."""
    return request.param


def with_ledger(make_side: MakeSide, url: str, ledger: MemoryLedger, **options: Any) -> Side:
    """A ledger of the right kind for the side that the test is run for."""
    try:
        return make_side(url, ledger=ledger, **options)
    except ValueError:
        return make_side(url, ledger=AsyncMemoryLedger(ledger), **options)


def test_three_failures_in_a_row_abandon_the_lease_and_leave_the_key_alone(
    make_side: MakeSide, redis_url: str, proxy, outage: str
) -> None:
    line = proxy(*address(redis_url))
    direct = make_side(redis_url)
    side = make_side(f"redis://127.0.0.1:{line.port}/0")
    lease = side.acquire("job:1", ttl=TTL)
    getattr(line, outage)()

    [lost] = side.recorder.wait_for(Lost)
    assert lost.reason == "abandoned"
    assert lost.held_for < TTL * 8 / 9 + 0.05, "known before the deadline"
    assert [event.failures for event in side.recorder.of(RenewalFailed)] == [1, 2, 3]
    assert [event.policy for event in side.recorder.of(Abandoned)] == ["fence"]
    with pytest.raises(LeaseLost) as error:
        lease.check()
    assert error.value.reason == "abandoned"
    assert direct.peek("job:1").holder == lease.holder, "the key is left alone"

    line.heal()
    line.clear()
    side.leave(lease)
    with pytest.raises(LeaseLost) as sticky:
        side.release(lease)
    assert sticky.value is error.value
    assert line.commands == [], "no release is sent for a lease that was abandoned"
    assert len(side.recorder.of(RenewalFailed)) == 3, "exactly three tries"


def test_with_continue_the_work_goes_on_and_the_ledger_decides(
    make_side: MakeSide, redis_url: str, proxy, outage: str
) -> None:
    line, ledger = proxy(*address(redis_url)), MemoryLedger()
    policy = Policy(ttl=TTL, renewal=Renewal(on_failure="continue"))
    side = with_ledger(make_side, f"redis://127.0.0.1:{line.port}/0", ledger, policy=policy)
    successor = with_ledger(make_side, redis_url, ledger)
    lease = side.acquire("job:1")
    getattr(line, outage)()

    [abandoned] = side.recorder.wait_for(Abandoned)
    assert (abandoned.policy, abandoned.failures) == ("continue", 3)
    assert len(side.recorder.of(RenewalFailed)) == 3
    assert side.recorder.of(Lost) == []
    lease.check()
    ledger.assert_current(lease.grant)

    newer = successor.acquire("job:1", wait=5)
    lease.check()  # as far as this process knows
    with pytest.raises(StaleToken) as stale:
        ledger.assert_current(lease.grant)
    assert stale.value.stored_token == newer.token

    line.heal()
    line.clear()
    side.leave(lease)
    assert line.commands == [], "release is skipped"
    assert len(side.recorder.of(LeftToExpire)) == 1
    assert successor.peek("job:1").holder == newer.holder
    successor.release(newer)


def test_failures_that_are_not_in_a_row_do_not_abandon(make_side: MakeSide, redis_url: str, proxy) -> None:
    line = proxy(*address(redis_url))
    side = make_side(f"redis://127.0.0.1:{line.port}/0")
    lease = side.acquire("job:1", ttl=TTL)
    for turn in (1, 2):
        line.cut()
        side.recorder.wait_for(RenewalFailed, 2 * turn)
        line.heal()
        side.recorder.wait_for(Renewed, turn)
        lease.check()
    assert [event.failures for event in side.recorder.of(RenewalFailed)] == [1, 2, 1, 2]
    assert side.recorder.of(Lost) == []
    side.release(lease)


def test_policy_switched_in_an_incident_takes_effect_on_leases_that_are_held(
    make_side: MakeSide, redis_url: str, proxy
) -> None:
    line, ledger = proxy(*address(redis_url)), MemoryLedger()
    side = with_ledger(make_side, f"redis://127.0.0.1:{line.port}/0", ledger, policy=Policy(ttl=TTL))
    lease = side.acquire("job:1")
    line.cut()
    side.recorder.wait_for(RenewalFailed, 1)
    side.leases.policy = Policy(ttl=TTL, renewal=Renewal(on_failure="continue"))
    [abandoned] = side.recorder.wait_for(Abandoned)
    assert abandoned.policy == "continue"
    lease.check()
    line.heal()
    side.renew(lease)  # the key is still there: held again
    assert lease.time_left > 0
    side.release(lease)


def test_max_hold_ends_renewal_and_then_the_lease(make_side: MakeSide, redis_url: str) -> None:
    side, other = make_side(redis_url), make_side(redis_url)
    side.acquire("job:1", ttl=0.3, renewal=Renewal(max_hold=0.5))
    side.recorder.wait_for(RenewalStopped)
    [lost] = side.recorder.wait_for(Lost)
    assert lost.reason == "expired"
    assert 0.5 <= lost.held_for < 0.95
    assert other.acquire("job:1", wait=2)


def test_lease_deleted_under_a_holder_is_noticed_at_the_next_renewal(
    make_side: MakeSide, redis_url: str, redis_client, namespace: str
) -> None:
    side, other = make_side(redis_url), make_side(redis_url)
    side.acquire("job:1", ttl=0.6)
    redis_client.delete(f"fencing:1:{{{namespace}/0}}:lease:job:1")
    newer = other.acquire("job:1", ttl=5)
    [lost] = side.recorder.wait_for(Lost)
    assert lost.reason == "superseded"
    assert other.peek("job:1").holder == newer.holder


def test_renewal_keeps_many_leases_alive_far_beyond_their_ttl(make_side: MakeSide, redis_url: str) -> None:
    side = make_side(redis_url)
    leases = [side.acquire(f"job:{n}", ttl=0.5) for n in range(50)]
    side.recorder.wait_for(Renewed, 50 * 5)
    for lease in leases:
        lease.check()
        side.release(lease)
    assert side.recorder.of(Lost) == []
    assert max(event.late for event in side.recorder.of(Renewed)) < 0.5 / 3


def test_continue_needs_a_ledger(redis_client) -> None:
    with pytest.raises(ValueError, match="ledger"):
        Leases(redis_client, policy=Policy(renewal=Renewal(on_failure="continue")))


def test_stale_release_counts_once_and_names_the_new_holder(
    make_side: MakeSide, redis_url: str, redis_client, namespace: str
) -> None:
    side = make_side(redis_url)
    other = make_side(redis_url, label="the-new-one")
    lease = side.acquire("job:1", ttl=30)
    redis_client.delete(f"fencing:1:{{{namespace}/0}}:lease:job:1")
    newer = other.acquire("job:1")
    with pytest.raises(LeaseNotHeld, match="the-new-one"):
        side.release(lease)
    wait_until(lambda: other.peek("job:1").holder == newer.holder)
