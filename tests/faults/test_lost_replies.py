"""The request arrived, its answer did not: nothing is taken twice, and ignorance is said."""

from __future__ import annotations

import pytest
from faults.conftest import MakeSide
from faults.test_renewal_failures import address

from fencing import BackendUnavailable, LeaseLost
from fencing.events import Acquired, BackendFailed, Lost, Released, Renewed


@pytest.fixture
def line(proxy, redis_url: str):
    return proxy(*address(redis_url))


@pytest.fixture
def side(make_side: MakeSide, line):
    side = make_side(f"redis://127.0.0.1:{line.port}/0")
    side.release(side.acquire("warm up"))
    return side


@pytest.mark.parametrize("loses", ["close_on_reply", "drop_replies"])
def test_acquire_is_asked_again_and_gets_the_same_token(
    side, line, make_side: MakeSide, redis_url: str, loses: str
) -> None:
    getattr(line, loses)(1, command=b"EVALSHA")
    lease = side.acquire("job:1", ttl=30, wait=5)
    held_by = make_side(redis_url).peek("job:1")
    assert (held_by.holder, held_by.token) == (lease.holder, lease.token)
    assert [event.sent for event in side.recorder.of(BackendFailed)] == [True]
    assert side.recorder.of(Acquired)[-1].asked == 2
    assert held_by.time_left > 30 - 1, "the TTL counts from the request that was answered"
    side.release(lease)


def test_lost_answer_to_a_renewal_is_a_failure_and_the_next_one_mends_it(side, line) -> None:
    lease = side.acquire("job:1", ttl=0.9)
    line.close_on_reply(1, command=b"EVALSHA")
    line.wait_for_lost(1)
    side.recorder.wait_for(Renewed)
    lease.check()
    assert side.recorder.of(Lost) == []
    side.release(lease)


def test_lost_answer_to_a_release_is_unknown_and_not_called_not_held(
    side, line, make_side: MakeSide, redis_url: str
) -> None:
    lease = side.acquire("job:1", ttl=30)
    line.close_on_reply(1, command=b"EVALSHA")
    with pytest.raises(LeaseLost) as unknown:
        side.release(lease)
    assert unknown.value.reason == "unknown"
    assert side.recorder.of(Released)[-1].outcome == "unknown"
    assert make_side(redis_url).peek("job:1") is None, "it was in fact released"


def test_lost_answer_to_a_release_does_not_disturb_the_end_of_a_block(side, line) -> None:
    lease = side.acquire("job:1", ttl=30)
    line.close_on_reply(1, command=b"EVALSHA")
    side.leave(lease)
    assert side.recorder.of(Released)[-1].outcome == "unknown"


def test_acquire_that_nobody_answers_fails_within_its_bound_and_gives_back(
    side, line, make_side: MakeSide, redis_url: str
) -> None:
    line.drop_replies(command=b"EVALSHA")
    with pytest.raises(BackendUnavailable) as unavailable:
        side.acquire("job:1", ttl=30, wait=0.1)
    assert unavailable.value.sent
    line.heal()
    assert make_side(redis_url).acquire("job:1", wait=5), "what it may have got was given back"


def test_release_that_nobody_answers_raises_and_the_lease_runs_out(
    side, line, make_side: MakeSide, redis_url: str
) -> None:
    lease = side.acquire("job:1", ttl=3)
    line.deaf()
    with pytest.raises(BackendUnavailable):
        side.release(lease)
    assert lease.lost.reason == "unknown", "it may have been released"
    assert make_side(redis_url).acquire("job:1", wait=5)
