"""What users call: leases for threads and for asyncio, each behaviour shown for both."""

import asyncio
import functools
import inspect
import logging
import os
import pickle
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import redis
import redis.asyncio

from fencing import (
    AsyncLease,
    AsyncLeases,
    BackendUnavailable,
    ConfigurationError,
    FencingError,
    Lease,
    LeaseLost,
    LeaseNotHeld,
    Leases,
    LeaseUnavailable,
    LoggingObserver,
    Policy,
    Renewal,
    TokenRegression,
    Wait,
)
from fencing.backends.base import Acquire, Behind, Command, Done, Peek, Release, Renew, Reply, Target
from fencing.events import (
    Abandoned,
    Acquired,
    CallbackFailed,
    Event,
    GivenBack,
    LeftToExpire,
    Lost,
    NotHeld,
    OrphanFound,
    PolicySwitched,
    Released,
    ReleaseFailed,
    TokenRegressed,
    Unavailable,
)
from fencing.flows import Ask, acquire
from fencing.testing import (
    AsyncMemoryBackend,
    AsyncMemoryLedger,
    FakeClock,
    MemoryBackend,
    MemoryLedger,
    supersede,
    supersede_async,
)
from fencing.token import Grant, HeldBy, check_holder

TTL = 9.0
CONTINUE = Renewal(on_failure="continue")
SOON = 30.0  # seconds after which a test that waits for another thread gives up


class Twin:
    """A backend, a ledger and a clock in memory, and the same words for threads and asyncio."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.backend = MemoryBackend(self.clock)
        self.ledger = MemoryLedger()
        self.events: list[Event] = []

    def live_on(self, backend: MemoryBackend) -> None:
        self.backend = backend

    def told(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if not kinds or type(event) in kinds]

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def asked(self, kind: type[Command]) -> int:
        return sum(isinstance(command, kind) for command in self.backend.asked)

    def holder_of(self, resource: str) -> str | None:
        """Who holds it, asked past everybody."""
        reply: Any = self.backend._answer(Peek(Target("test", (resource,))))
        return None if reply.held_by is None else reply.held_by.holder

    def dead_holder(self, resource: str, ttl: float = TTL) -> str:
        """Somebody took the resource and died; the holder."""
        command = Acquire(Target("test", (resource,)), os.urandom(16).hex(), "dead:1", int(ttl * 1000))
        self.backend._answer(command)
        return command.holder

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "namespace": "test",
            "observers": [self.events.append],
            "policy": Policy(ttl=TTL),
            "label": "me:1",
        } | given


class Threads(Twin):
    def leases(self, *, ledger: bool = False, **settings: Any) -> Leases:
        return Leases(self.backend, ledger=self.ledger if ledger else None, **self.settings(settings))

    async def do(self, value: Any) -> Any:
        return value

    async def close(self, leases: Leases) -> None:
        leases.close()

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def supersede(self, lease: Lease) -> Lease:
        return supersede(lease)

    async def settle(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "fencing-on-lost":
                thread.join(SOON)

    def inside(self, make: Callable[[], Any]) -> "Inside":
        return Inside(make)

    def interrupted(self) -> AbstractContextManager[object]:
        """A thread is never interrupted by a loss."""
        return nullcontext()

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return body

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(StopIteration):
            story.send(None)


class Tasks(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.live_on(self.backend)

    def live_on(self, backend: MemoryBackend) -> None:
        self.backend = backend
        self.async_backend = AsyncMemoryBackend(sync=backend)

    def leases(self, *, ledger: bool = False, **settings: Any) -> AsyncLeases:
        async_ledger = AsyncMemoryLedger(self.ledger) if ledger else None
        return AsyncLeases(self.async_backend, ledger=async_ledger, **self.settings(settings))

    async def do(self, value: Any) -> Any:
        return await value

    async def close(self, leases: AsyncLeases) -> None:
        await leases.aclose()

    async def advance(self, seconds: float) -> None:
        await self.clock.advance_async(seconds)

    async def supersede(self, lease: AsyncLease) -> AsyncLease:
        return await supersede_async(lease)

    async def settle(self) -> None:
        await settled()

    def inside(self, make: Callable[[], Any]) -> Any:
        return make()

    def interrupted(self) -> AbstractContextManager[object]:
        """A task is, and its block raises."""
        return pytest.raises(LeaseLost)

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        return coroutine

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        asyncio.run(story)


class Inside:
    """A `with` block that reads as ``async with``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def __aenter__(self) -> Any:
        self._entered = self._make()
        return self._entered.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)


AnyTwin = Threads | Tasks


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "asyncio"])
def twin(request: pytest.FixtureRequest) -> AnyTwin:
    return request.param()


def story(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Tell the test to both twins: for threads its coroutine never waits, for asyncio it does."""

    @functools.wraps(test)
    def told(twin: AnyTwin, **arguments: Any) -> None:
        twin.run(test(twin, **arguments))

    assert next(iter(inspect.signature(test).parameters)) == "twin"
    return told


async def settled(turns: int = 10) -> None:
    """Let every task that can go on do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


# Acquire


@story
async def test_an_acquired_lease_knows_what_it_is(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    assert (lease.resource, lease.resources, lease.namespace) == ("a", ("a",), "test")
    assert (lease.label, lease.ttl, lease.time_left) == ("me:1", TTL, TTL)
    assert (lease.held, lease.lost) == (True, None)
    assert lease.grant == Grant("test", ("a",), lease.holder, lease.token, 1000.0 + TTL, "me:1")
    assert check_holder(lease.holder) == twin.holder_of("a")
    assert pickle.loads(pickle.dumps(lease.grant)) == lease.grant
    assert "'a'" in repr(lease)
    assert str(lease.token) in repr(lease)
    lease.check()


@story
async def test_leaving_the_block_releases(twin: AnyTwin) -> None:
    async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
        assert twin.holder_of("a") == lease.holder
    assert twin.holder_of("a") is None
    assert (lease.held, lease.lost, lease.time_left) == (False, None, 0.0)
    with pytest.raises(LeaseNotHeld):
        lease.check()


@story
async def test_a_held_lease_may_be_entered_later(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    async with twin.inside(lambda: lease) as entered:
        assert entered is lease
    assert twin.holder_of("a") is None


@story
async def test_each_acquisition_has_a_higher_token_and_another_holder(twin: AnyTwin) -> None:
    leases = twin.leases()
    seen: list[tuple[int, str]] = []
    for _ in range(5):
        async with twin.inside(lambda: leases.acquire("a")) as lease:
            seen.append((lease.token, lease.holder))
    tokens, holders = zip(*seen, strict=True)
    assert list(tokens) == sorted(set(tokens))
    assert len(set(holders)) == 5


@story
async def test_the_label_is_the_calls_or_the_settings_or_names_the_process(twin: AnyTwin) -> None:
    assert (await twin.do(twin.leases().acquire("a", label="mine"))).label == "mine"
    assert (await twin.do(twin.leases(label="ours").acquire("b"))).label == "ours"
    assert (await twin.do(twin.leases(label=None).acquire("c"))).label.endswith(f":{os.getpid()}")


@story
async def test_namespaces_do_not_contend(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    assert await twin.do(twin.leases(namespace="other").try_acquire("a"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl": 0},
        {"ttl": "long"},
        {"label": "x" * 201},
        {"wait": -1.0},
        {"resource": ""},
        {"resource": "x" * 1025},
        {"hold_to_ttl": "no"},
        {"wait": "long"},
        {"wait": True},
    ],
    ids=str,
)
@story
async def test_a_wrong_call_is_refused_before_anything_is_sent(
    twin: AnyTwin, wrong: dict[str, object]
) -> None:
    options = {"resource": "a"} | wrong
    leases = twin.leases()
    with pytest.raises(ConfigurationError):
        await twin.do(leases.acquire(options.pop("resource"), **options))
    assert twin.backend.asked == []
    assert await twin.do(leases.try_acquire("a"))


@story
async def test_try_acquire_gives_none_when_somebody_else_holds_it(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    before = twin.clock.now()
    assert await twin.do(twin.leases().try_acquire("a")) is None
    assert twin.clock.now() == before
    assert [event.held_by.label for event in twin.told(Unavailable)] == ["me:1"]


@story
async def test_try_acquire_raises_when_the_backend_fails_which_is_not_contention(twin: AnyTwin) -> None:
    leases = twin.leases()
    twin.backend.fail_next(3)
    with pytest.raises(BackendUnavailable):
        await twin.do(leases.try_acquire("a"))
    assert twin.told(Unavailable) == []
    assert await twin.do(leases.try_acquire("a"))


@story
async def test_busy_after_the_budget_says_who_holds_it_and_for_how_long(twin: AnyTwin) -> None:
    holder = await twin.do(twin.leases(label="the other").acquire("a"))
    with pytest.raises(LeaseUnavailable) as caught:
        await twin.do(twin.leases().acquire("a", wait=2.0))
    error = caught.value
    assert error.resource == "a"
    assert error.held_by is not None
    assert (error.held_by.holder, error.held_by.token) == (holder.holder, holder.token)
    assert error.held_by.label == "the other"
    assert error.retry_after == pytest.approx(TTL - 2.0)
    assert "the other" in str(error)
    [unavailable] = twin.told(Unavailable)
    assert unavailable.waited == pytest.approx(2.0)
    assert twin.clock.now() == pytest.approx(1002.0)


@story
async def test_a_wait_may_be_given_in_full(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    asked = len(twin.backend.asked)
    with pytest.raises(LeaseUnavailable):
        await twin.do(twin.leases().acquire("a", wait=Wait(budget=2.0, backoff=0.5, jitter=0)))
    assert len(twin.backend.asked) - asked == 5


@story
async def test_a_wait_ends_wherever_the_clock_stands(twin: AnyTwin) -> None:
    class Counting(FakeClock):
        slept = 0

        def sleep(self, seconds: float) -> None:
            self.slept += 1
            if self.slept > 1000:
                raise RecursionError("it sleeps for ever")
            super().sleep(seconds)

        async def sleep_async(self, seconds: float) -> None:
            self.sleep(seconds)

    for milliseconds in range(22_000, 22_050):
        twin.clock = Counting()
        twin.clock.pause(milliseconds / 1000)
        twin.live_on(MemoryBackend(twin.clock))
        twin.dead_holder("a", ttl=300.0)
        with pytest.raises(LeaseUnavailable):
            await twin.do(twin.leases().acquire("a", wait=Wait(budget=2.0, backoff=0.3, jitter=0.0)))


@story
async def test_a_waiter_gets_the_lease_when_the_ttl_of_a_dead_holder_runs_out(twin: AnyTwin) -> None:
    dead = twin.dead_holder("a")
    lease = await twin.do(twin.leases().acquire("a", wait=60.0))
    assert 1009.0 <= twin.clock.now() <= 1009.1
    assert lease.time_left == TTL
    [orphan] = twin.told(OrphanFound)
    assert (orphan.previous.holder, orphan.previous.label) == (dead, "dead:1")
    assert 0 <= orphan.unowned < 0.1
    [acquired] = twin.told(Acquired)
    assert acquired.waited == pytest.approx(9.0, abs=0.1)
    assert acquired.asked == twin.asked(Acquire)


@story
async def test_a_released_lease_leaves_no_orphan(twin: AnyTwin) -> None:
    leases = twin.leases()
    for _ in range(3):
        async with twin.inside(lambda: leases.acquire("a")):
            pass
    assert twin.told(OrphanFound) == []


@story
async def test_a_lost_answer_to_an_acquire_is_harmless(twin: AnyTwin) -> None:
    twin.backend.lose_replies(2)
    lease = await twin.do(twin.leases().acquire("a"))
    assert twin.holder_of("a") == lease.holder
    assert len({command.holder for command in twin.backend.asked}) == 1  # type: ignore[union-attr]
    assert twin.names() == ["backend.failed", "backend.failed", "lease.acquired"]


@story
async def test_an_acquire_whose_answers_are_all_lost_gives_back(twin: AnyTwin) -> None:
    twin.backend.lose_replies(3)
    with pytest.raises(BackendUnavailable):
        await twin.do(twin.leases().acquire("a"))
    assert twin.holder_of("a") is None
    assert [event.cause for event in twin.told(GivenBack)] == ["BackendUnavailable"]


# The ledger


@story
async def test_an_acquisition_is_claimed_at_the_ledger(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases(ledger=True).acquire("a"))
    assert twin.ledger.rows == {("test", "a"): (lease.token, lease.holder)}


@story
async def test_a_backend_that_went_backwards_is_lifted_above_the_ledger(twin: AnyTwin) -> None:
    leases = twin.leases(ledger=True)
    async with twin.inside(lambda: leases.acquire("a")) as before:
        pass
    twin.backend.forget()
    twin.clock.set_wall(twin.clock.wall() - 3600)
    lease = await twin.do(leases.acquire("a"))
    assert lease.token == before.token + 1
    assert twin.ledger.rows["test", "a"] == (lease.token, lease.holder)
    [regressed] = twin.told(TokenRegressed)
    assert regressed.ledger_token == before.token
    assert regressed.refused_token < before.token


@story
async def test_a_ledger_far_ahead_of_every_clock_is_not_followed(twin: AnyTwin) -> None:
    """One bad token must not spread: somebody has to look."""
    two_years_ahead = int((twin.clock.wall() + 2 * 365 * 86400) * 1e6)
    twin.ledger.rows["test", "a"] = (two_years_ahead, "f" * 32)
    leases = twin.leases(ledger=True)
    with pytest.raises(TokenRegression) as caught:
        await twin.do(leases.acquire("a"))
    assert caught.value.ledger_token == two_years_ahead
    assert twin.holder_of("a") is None
    assert (await twin.do(leases.acquire("b"))).token < two_years_ahead


@story
async def test_several_rows_ahead_are_overtaken_in_one_step(twin: AnyTwin) -> None:
    now = int(twin.clock.wall() * 1e6)
    twin.ledger.rows |= {("test", "a"): (now + 10, "f" * 32), ("test", "b"): (now + 20, "f" * 32)}
    lease = await twin.do(twin.leases(ledger=True).acquire_all(["a", "b", "c"]))
    assert lease.token == now + 21
    assert len(twin.told(TokenRegressed)) == 1


@story
async def test_a_claim_that_fails_gives_the_lease_back(twin: AnyTwin) -> None:
    def broken(grant: Grant) -> Behind | None:
        raise RuntimeError("the database is down")

    twin.ledger.claim = broken  # type: ignore[method-assign]
    leases = twin.leases(ledger=True)
    with pytest.raises(RuntimeError, match="the database is down"):
        await twin.do(leases.acquire("a"))
    assert twin.holder_of("a") is None
    assert leases.gate._inside == {}


@story
async def test_who_takes_its_own_expired_lease_again_is_no_orphan(twin: AnyTwin) -> None:
    def slow(grant: Grant, claim: Any = twin.ledger.claim) -> Behind | None:
        if not twin.ledger.rows:
            twin.clock.pause(TTL)
        answer: Behind | None = claim(grant)
        return answer

    twin.ledger.claim = slow  # type: ignore[method-assign]
    await twin.do(twin.leases(ledger=True).acquire("a", wait=60.0))
    assert twin.told(OrphanFound) == []


# Hold to the TTL


@story
async def test_a_lease_held_to_its_ttl_is_neither_renewed_nor_released_nor_an_orphan(twin: AnyTwin) -> None:
    leases = twin.leases()
    async with twin.inside(lambda: leases.acquire("a", hold_to_ttl=True)) as lease:
        await twin.advance(5.0)
    assert twin.holder_of("a") == lease.holder
    assert (twin.asked(Renew), twin.asked(Release)) == (0, 0)
    assert [type(event) for event in twin.told()] == [Acquired, LeftToExpire]
    assert await twin.do(leases.try_acquire("a")) is None
    assert await twin.do(twin.leases().try_acquire("a")) is None
    await twin.advance(4.1)
    assert twin.holder_of("a") is None
    assert await twin.do(leases.try_acquire("a"))
    assert twin.told(OrphanFound, Lost) == []


@story
async def test_a_lease_held_to_its_ttl_and_renewed_by_hand_leaves_no_note_either(twin: AnyTwin) -> None:
    for hold in (True, False):
        lease = await twin.do(twin.leases().acquire(f"hold {hold}", hold_to_ttl=hold))
        await twin.do(lease.renew())
        [*_, renewal] = twin.backend.asked
        assert isinstance(renewal, Renew)
        assert renewal.note is not hold


@story
async def test_a_policy_may_hold_to_the_ttl_and_a_call_may_not(twin: AnyTwin) -> None:
    leases = twin.leases(policy=Policy(ttl=TTL, hold_to_ttl=True))
    async with twin.inside(lambda: leases.acquire("a")):
        pass
    async with twin.inside(lambda: leases.acquire("b", hold_to_ttl=False)):
        pass
    assert (twin.holder_of("a") is None, twin.holder_of("b") is None) == (False, True)


@story
async def test_an_explicit_release_frees_a_lease_held_to_its_ttl(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", hold_to_ttl=True))
    await twin.do(lease.release())
    assert twin.holder_of("a") is None


# Release


@story
async def test_an_explicit_release_frees_the_resource_once(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(4.0)
    await twin.do(lease.release())
    assert twin.holder_of("a") is None
    [released] = twin.told(Released)
    assert (released.outcome, released.held_for) == ("confirmed", 4.0)
    for use in (lease.release, lease.renew, lambda: lease.extend(5.0)):
        with pytest.raises(LeaseNotHeld):
            await twin.do(use())
    assert twin.asked(Release) == 1


@story
async def test_leaving_the_block_after_an_explicit_release_sends_nothing(twin: AnyTwin) -> None:
    async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
        await twin.do(lease.release())
    assert twin.asked(Release) == 1


@story
async def test_a_release_of_what_somebody_else_holds_is_refused_and_deletes_nothing(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    other = await twin.supersede(lease)
    for _ in range(2):
        with pytest.raises(LeaseNotHeld) as caught:
            await twin.do(lease.release())
        assert caught.value.held_by is not None
        assert caught.value.held_by.holder == other.holder
    assert twin.holder_of("a") == other.holder
    assert lease.lost.reason == "superseded"
    assert [event.verb for event in twin.told(NotHeld)] == ["release", "release"]
    assert len(twin.told(Lost)) == 1
    assert twin.told(Released) == []


@story
async def test_a_release_of_what_has_ended_is_refused(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.expire("test", "a")
    with pytest.raises(LeaseNotHeld) as caught:
        await twin.do(lease.release())
    assert caught.value.held_by is None
    assert lease.lost.reason == "expired"


def test_the_check_of_a_release_convicts_one_that_ignores_the_holder(twin: AnyTwin) -> None:
    class Careless(MemoryBackend):
        def _release(self, command: Release) -> Reply:
            for resource in command.target.resources:
                self._leases.pop((command.target.namespace, resource), None)
            return Done()

    twin.live_on(Careless(twin.clock))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_release_of_what_somebody_else_holds_is_refused_and_deletes_nothing(twin)


@pytest.mark.parametrize("trouble", ["fail_next", "lose_replies"])
@story
async def test_a_block_does_not_raise_for_a_failed_release(twin: AnyTwin, trouble: str) -> None:
    async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
        getattr(twin.backend, trouble)(3)
    assert [event.token for event in twin.told(ReleaseFailed)] == [lease.token]
    assert twin.asked(Release) == 3


@story
async def test_a_block_does_not_raise_for_a_lease_that_had_ended(twin: AnyTwin) -> None:
    async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
        await twin.supersede(lease)
    assert [event.verb for event in twin.told(NotHeld)] == ["release"]
    assert lease.lost.reason == "superseded"


@pytest.mark.parametrize("trouble", ["none", "fail_next", "lose_replies", "superseded", "released"])
@story
async def test_a_block_never_masks_the_exception_of_its_body(twin: AnyTwin, trouble: str) -> None:
    error = ValueError("the work failed")
    with pytest.raises(ValueError, match="the work failed") as caught:
        async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
            if trouble == "superseded":
                await twin.supersede(lease)
            elif trouble == "released":
                await twin.do(lease.release())
            elif trouble != "none":
                getattr(twin.backend, trouble)(3)
            raise error
    assert caught.value is error


@story
async def test_a_release_whose_answer_was_lost_and_that_is_gone_is_unknown(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.lose_replies(1)
    with pytest.raises(LeaseLost) as caught:
        await twin.do(lease.release())
    assert caught.value.reason == "unknown"
    assert [event.outcome for event in twin.told(Released)] == ["unknown"]
    assert twin.told(NotHeld, Lost) == []
    assert lease.lost.reason == "unknown"
    assert twin.holder_of("a") is None
    asked = twin.asked(Release)
    with pytest.raises(LeaseLost):
        await twin.do(lease.release())
    assert twin.asked(Release) == asked


@story
async def test_the_error_of_an_unknown_release_is_the_sticky_one(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.lose_replies(1)
    with pytest.raises(LeaseLost) as caught:
        await twin.do(lease.release())
    assert caught.value is lease.lost


@story
async def test_a_block_is_silent_about_an_unknown_release(twin: AnyTwin) -> None:
    async with twin.inside(lambda: twin.leases().acquire("a")):
        twin.backend.lose_replies(1)
    assert twin.names() == ["lease.acquired", "backend.failed", "lease.released"]
    assert [event.outcome for event in twin.told(Released)] == ["unknown"]


@story
async def test_an_explicit_release_raises_when_nobody_answers_and_may_be_tried_again(twin: AnyTwin) -> None:
    leases = twin.leases()
    lease = await twin.do(leases.acquire("a"))
    twin.backend.fail_next(3)
    with pytest.raises(BackendUnavailable):
        await twin.do(lease.release())
    await twin.advance(5.0)
    assert twin.asked(Renew) == 0
    await twin.do(lease.release())
    assert twin.holder_of("a") is None


@story
async def test_a_lease_that_may_have_been_released_is_not_held(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.lose_replies(3)
    with pytest.raises(BackendUnavailable):
        await twin.do(lease.release())
    assert await twin.do(twin.leases().try_acquire("a"))
    with pytest.raises(FencingError):
        lease.check()


@story
async def test_a_resource_whose_release_failed_can_be_asked_for_in_the_process(twin: AnyTwin) -> None:
    leases = twin.leases()
    async with twin.inside(lambda: leases.acquire("a")):
        twin.backend.fail_next(3)
    assert await twin.do(leases.try_acquire("a")) is None
    assert await twin.do(leases.acquire("a", wait=20.0))


# Renew and extend


@story
async def test_renewing_counts_the_ttl_anew(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.clock.pause(2.0)
    assert lease.time_left == TTL - 2.0
    await twin.do(lease.renew())
    assert lease.time_left == TTL
    assert lease.grant.deadline == 1002.0 + TTL


@story
async def test_extending_holds_on_for_another_ttl_from_now_on(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.do(lease.extend(60.0))
    assert (lease.ttl, lease.time_left) == (60.0, 60.0)
    assert (await twin.do(twin.leases().peek("a"))).time_left == 60.0


@pytest.mark.parametrize("ttl", [0, -1, "long", 1e9])
@story
async def test_extending_by_nonsense_is_refused_and_changes_nothing(twin: AnyTwin, ttl: object) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    with pytest.raises(ConfigurationError):
        await twin.do(lease.extend(ttl))
    assert twin.asked(Renew) == 0
    assert (lease.ttl, lease.held) == (TTL, True)


@story
async def test_an_extended_lease_does_not_outlast_what_the_backend_was_told(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.do(lease.extend(100.0009))
    twin.clock.pause(100.0005)
    assert await twin.do(twin.leases().try_acquire("a"))
    with pytest.raises(LeaseLost):
        lease.check()


class Crossing(MemoryBackend):
    """Lets a renewal in the background overtake a renewal by hand, on the way there or on the way back."""

    meanwhile: Callable[[], Any] | None = None

    def ask(self, command: Command, timeout: float) -> Reply:
        reply = super().ask(command, timeout)
        if isinstance(command, Renew) and self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            happens()
        return reply


def extend_across_a_renewal(backend: MemoryBackend, lease: Lease) -> None:
    """An extension arrives, then a renewal that was sent before it; the extension's answer comes last."""
    assert isinstance(backend, Crossing)
    backend.clock.pause(TTL / 3)  # type: ignore[attr-defined]
    backend.meanwhile = lambda: backend.clock.advance(0)  # type: ignore[attr-defined]
    lease.extend(90.0)


def test_an_extension_crossed_by_a_renewal_does_not_outlast_what_the_backend_knows() -> None:
    """Sent again or counted as the shorter one: as long as the lease says it is held, it is."""
    twin = Threads()
    twin.live_on(Crossing(twin.clock))
    lease = twin.leases().acquire("a")
    extend_across_a_renewal(twin.backend, lease)
    twin.clock.advance(0)
    assert lease.time_left == 90.0  # sent again at once
    twin.clock.advance(TTL + 1)
    lease.check()
    assert twin.holder_of("a") == lease.holder


def test_an_extension_crossed_by_a_renewal_is_what_the_backend_keeps() -> None:
    twin = Threads()
    twin.live_on(Crossing(twin.clock))
    lease = twin.leases().acquire("a")
    extend_across_a_renewal(twin.backend, lease)
    twin.backend.fail_next(100)
    twin.clock.advance(TTL + 1)
    assert lease.held
    assert twin.holder_of("a") == lease.holder


def test_a_renewal_crossed_by_an_extension_does_not_shorten_it() -> None:
    """The other way round: the renewal was under way when the extension came, and arrives after it."""
    twin = Threads()

    class Overtaken(MemoryBackend):
        def ask_many(self, commands: Any, timeout: float) -> Any:
            lease.extend(90.0)
            return super().ask_many(commands, timeout)

    twin.live_on(Overtaken(twin.clock))
    lease = twin.leases().acquire("a")
    twin.clock.pause(TTL / 3)
    lease._leases._renewer.turn()
    twin.backend.fail_next(100)
    twin.clock.pause(TTL + 1)
    lease.check()
    assert twin.holder_of("a") == lease.holder


@story
async def test_renewing_what_somebody_else_holds_is_refused_and_lost(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    other = await twin.supersede(lease)
    with pytest.raises(LeaseNotHeld) as caught:
        await twin.do(lease.renew())
    assert caught.value.held_by is not None
    assert caught.value.held_by.holder == other.holder
    assert lease.lost.reason == "superseded"
    assert [event.verb for event in twin.told(NotHeld)] == ["renew"]
    with pytest.raises(LeaseLost) as again:
        await twin.do(lease.renew())
    assert again.value is lease.lost


@story
async def test_a_renewal_by_hand_that_fails_raises_and_the_lease_is_still_held(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.fail_next(2)
    with pytest.raises(BackendUnavailable):
        await twin.do(lease.renew())
    assert lease.held


@story
async def test_a_renewal_or_a_look_that_fails_at_once_is_tried_once_more(twin: AnyTwin) -> None:
    """A connection that was kept may have been closed meanwhile."""
    leases = twin.leases()
    lease = await twin.do(leases.acquire("a"))
    for use in (lease.renew, lambda: lease.extend(20.0), lambda: leases.peek("a")):
        twin.backend.fail_next(1)
        await twin.do(use())
    assert lease.time_left == 20.0


@story
async def test_an_extension_to_less_shortens_nothing_at_the_backend(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", ttl=300.0))
    twin.backend.lose_replies(2)
    with pytest.raises(BackendUnavailable):
        await twin.do(lease.extend(1.0))
    twin.clock.pause(2.0)
    lease.check()
    assert twin.holder_of("a") == lease.holder
    await twin.do(lease.extend(1.0))
    assert lease.time_left == 1.0
    twin.clock.pause(2.0)
    with pytest.raises(LeaseLost):
        lease.check()
    assert twin.holder_of("a") == lease.holder


# Peek


@story
async def test_peek_says_who_holds_a_resource(twin: AnyTwin) -> None:
    leases = twin.leases()
    assert await twin.do(leases.peek("a")) is None
    lease = await twin.do(leases.acquire("a"))
    twin.clock.pause(2.0)
    assert await twin.do(leases.peek("a")) == HeldBy(
        "a", lease.holder, lease.token, "me:1", 1_800_000_000.0, TTL - 2.0
    )
    with pytest.raises(ConfigurationError):
        await twin.do(leases.peek(""))


@story
async def test_peek_raises_when_the_backend_fails(twin: AnyTwin) -> None:
    twin.backend.fail_next(2)
    with pytest.raises(BackendUnavailable):
        await twin.do(twin.leases().peek("a"))


# Several resources


@story
async def test_several_resources_have_one_lease_one_holder_and_one_token(twin: AnyTwin) -> None:
    leases = twin.leases(ledger=True)
    async with twin.inside(lambda: leases.acquire_all(["b", "a", "b"], ttl=20.0)) as lease:
        assert (lease.resources, lease.resource, lease.ttl) == (("b", "a"), "b", 20.0)
        assert lease.grant.resources == ("b", "a")
        assert {twin.holder_of("a"), twin.holder_of("b")} == {lease.holder}
        assert set(twin.ledger.rows.values()) == {(lease.token, lease.holder)}
        await twin.advance(60.0)
        assert lease.held
    assert (twin.holder_of("a"), twin.holder_of("b")) == (None, None)


@story
async def test_several_resources_are_taken_all_or_none(twin: AnyTwin) -> None:
    leases = twin.leases()
    await twin.do(twin.leases(label="the other").acquire("b"))
    with pytest.raises(LeaseUnavailable) as caught:
        await twin.do(leases.acquire_all(["a", "b", "c"], wait=0.0))
    assert caught.value.held_by is not None
    assert (caught.value.held_by.resource, caught.value.held_by.label) == ("b", "the other")
    assert (twin.holder_of("a"), twin.holder_of("c")) == (None, None)
    assert leases.gate._inside == {}


@pytest.mark.parametrize("resources", [[], "abc", ["a", ""], ["a", None]])
@story
async def test_what_are_not_several_resources_is_refused(twin: AnyTwin, resources: Any) -> None:
    with pytest.raises(ConfigurationError):
        await twin.do(twin.leases().acquire_all(resources))
    assert twin.backend.asked == []


@story
async def test_several_resources_are_lost_together(twin: AnyTwin) -> None:
    called: list[LeaseLost] = []
    lease = await twin.do(twin.leases().acquire_all(["a", "b"], on_lost=called.append))
    twin.backend.expire("test", "b")
    await twin.advance(3.0)
    await twin.settle()
    assert called == [lease.lost]


@story
async def test_an_unknown_option_is_refused(twin: AnyTwin) -> None:
    with pytest.raises(TypeError):
        await twin.do(twin.leases().acquire("a", tll=5.0))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        await twin.do(twin.leases().acquire_all(["a"], tll=5.0))  # type: ignore[call-arg]


@story
async def test_who_loses_one_of_several_resources_while_claiming_gives_back_the_others(twin: AnyTwin) -> None:
    stranger = MemoryLedger()

    def meanwhile(grant: Grant) -> Behind | None:
        twin.backend.expire("test", "b")
        twin.dead_holder("b", ttl=300.0)
        stranger.rows["test", "b"] = (grant.token + 1, "f" * 32)
        return stranger.claim(grant)

    twin.ledger.claim = meanwhile  # type: ignore[method-assign]
    with pytest.raises(LeaseUnavailable):
        await twin.do(twin.leases(ledger=True).acquire_all(["a", "b"], wait=0.0))
    assert twin.holder_of("a") is None


# The decorator


@story
async def test_each_call_holds_a_lease_named_after_its_arguments(twin: AnyTwin) -> None:
    leases = twin.leases()

    def settle(invoice: int, *, kind: str = "plain") -> str | None:
        """Pay it."""
        return twin.holder_of(f"invoice:{invoice}:{kind}")

    held = leases.holding("invoice:{invoice}:{kind}")(twin.function(settle))
    for call in (lambda: held(42), lambda: held(invoice=42), lambda: held(42, kind="odd")):
        assert await twin.do(call()) is not None
    assert twin.holder_of("invoice:42:plain") is None
    assert (held.__name__, held.__doc__) == ("settle", "Pay it.")


@story
async def test_a_template_reaches_into_arguments(twin: AnyTwin) -> None:
    def work(job: Any, extra: dict[str, str]) -> bool:
        return twin.holder_of("job:7:blue") is not None

    held = twin.leases().holding("job:{job.id}:{extra[color]}")(twin.function(work))
    assert await twin.do(held(SimpleNamespace(id=7), {"color": "blue"}))


@story
async def test_a_parameter_named_lease_receives_the_lease(twin: AnyTwin) -> None:
    def work(number: int, lease: Any) -> Any:
        lease.check()
        return lease

    held = twin.leases().holding("n:{number}", ttl=20.0, label="worker")(twin.function(work))
    lease = await twin.do(held(5))
    assert (lease.resource, lease.ttl, lease.label, lease.held) == ("n:5", 20.0, "worker", False)


@story
async def test_a_method_can_hold_a_lease(twin: AnyTwin) -> None:
    leases = twin.leases()

    class Worker:
        name = "w1"

        @leases.holding("worker:{self.name}:{number}")
        @twin.function
        def work(self, number: int) -> bool:
            return twin.holder_of(f"worker:w1:{number}") is not None

    assert await twin.do(Worker().work(3))


@story
async def test_what_a_function_raises_comes_through_and_the_lease_is_released(twin: AnyTwin) -> None:
    def work() -> None:
        raise ValueError("the work failed")

    held = twin.leases().holding("a")(twin.function(work))
    with pytest.raises(ValueError, match="the work failed"):
        await twin.do(held())
    assert twin.holder_of("a") is None


@story
async def test_a_function_that_does_not_get_the_lease_is_not_called(twin: AnyTwin) -> None:
    called: list[int] = []
    twin.dead_holder("a")
    held = twin.leases().holding("a", wait=0.0)(twin.function(lambda: called.append(1)))
    with pytest.raises(LeaseUnavailable):
        await twin.do(held())
    assert called == []


@pytest.mark.parametrize(
    "template",
    ["{missing}", "{missing.id}", "{}", "{0}", "{number", "}", "{lease}", "{number!z}{missing[0]}"],
)
@story
async def test_a_bad_template_is_refused_when_the_function_is_decorated(twin: AnyTwin, template: str) -> None:
    def work(number: int, lease: Any) -> None: ...

    with pytest.raises(ConfigurationError):
        twin.leases().holding(template)(twin.function(work))


def generator() -> Any:
    yield 1


async def asynchronous_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [generator, asynchronous_generator])
def test_a_generator_is_refused_as_it_would_run_after_the_release(function: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        Threads().leases().holding("a")(function)


@pytest.mark.parametrize("function", [generator, asynchronous_generator])
def test_a_generator_is_refused_under_asyncio_too(function: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        Tasks().leases().holding("a")(function)


@story
async def test_a_function_of_the_other_kind_is_refused(twin: AnyTwin) -> None:
    other = Threads() if isinstance(twin, Tasks) else Tasks()
    with pytest.raises(ConfigurationError, match="coroutine"):
        twin.leases().holding("a")(other.function(lambda: None))


@story
async def test_a_call_without_its_arguments_is_a_type_error(twin: AnyTwin) -> None:
    def work(number: int) -> None: ...

    held = twin.leases().holding("n:{number}")(twin.function(work))
    with pytest.raises(TypeError):
        await twin.do(held())


@story
async def test_the_lease_may_be_the_first_parameter(twin: AnyTwin) -> None:
    def work(lease: Any, number: int) -> int:
        return number

    held = twin.leases().holding("n:{number}")(twin.function(work))
    assert await twin.do(held(5)) == 5


# Closing


@story
async def test_closing_releases_what_is_held_and_refuses_more(twin: AnyTwin) -> None:
    leases, others = twin.leases(), twin.leases()
    for name in ("a", "b"):
        await twin.do(leases.acquire(name))
    other = await twin.do(others.acquire("c"))
    await twin.close(leases)
    assert (twin.holder_of("a"), twin.holder_of("b")) == (None, None)
    assert twin.holder_of("c") == other.holder
    with pytest.raises(ConfigurationError, match="closed"):
        await twin.do(leases.acquire("a"))
    with pytest.raises(ConfigurationError, match="closed"):
        await twin.do(leases.try_acquire("a"))
    with pytest.raises(ConfigurationError, match="closed"):
        await twin.do(leases.peek("a"))
    await twin.close(leases)
    await twin.advance(60)
    assert other.held


@story
async def test_closing_releases_what_the_renewer_has_already_renewed(twin: AnyTwin) -> None:
    leases = twin.leases()
    lease = await twin.do(leases.acquire("a"))
    await twin.advance(4.0)
    await twin.close(leases)
    assert (twin.holder_of("a"), lease.held) == (None, False)


@story
async def test_leases_are_a_context_manager_that_closes(twin: AnyTwin) -> None:
    async with twin.inside(twin.leases) as leases:
        await twin.do(leases.acquire("a"))
    assert twin.holder_of("a") is None


@story
async def test_closing_leaves_what_is_held_to_its_ttl(twin: AnyTwin) -> None:
    leases = twin.leases()
    await twin.do(leases.acquire("a", hold_to_ttl=True))
    await twin.close(leases)
    assert twin.holder_of("a") is not None


@story
async def test_closing_does_not_raise_when_the_backend_is_down(twin: AnyTwin) -> None:
    leases = twin.leases()
    for name in ("a", "b"):
        await twin.do(leases.acquire(name))
    twin.backend.fail_next(100)
    await twin.close(leases)
    assert len(twin.told(ReleaseFailed)) == 2


# What fits together


def test_a_mix_of_sync_and_async_is_refused() -> None:
    sync, asynchronous = MemoryBackend(), AsyncMemoryBackend()
    wrong: list[Callable[[], object]] = [
        lambda: Leases(asynchronous),  # type: ignore[arg-type]
        lambda: AsyncLeases(sync),  # type: ignore[arg-type]
        lambda: Leases(sync, ledger=AsyncMemoryLedger()),  # type: ignore[arg-type]
        lambda: AsyncLeases(asynchronous, ledger=MemoryLedger()),  # type: ignore[arg-type]
        lambda: Leases(redis.asyncio.Redis()),  # type: ignore[arg-type]
        lambda: AsyncLeases(redis.Redis()),  # type: ignore[arg-type]
        lambda: Leases(object()),  # type: ignore[arg-type]
        lambda: AsyncLeases(object()),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(ConfigurationError):
            make()


def test_the_message_says_which_leases_to_use_instead() -> None:
    with pytest.raises(ConfigurationError, match="use AsyncLeases"):
        Leases(redis.asyncio.Redis())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use Leases"):
        AsyncLeases(redis.Redis())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"namespace": "a b"}, {"label": "x" * 201}, {"policy": 30.0}, {"policy": dict}], ids=str
)
def test_wrong_settings_are_refused(twin: AnyTwin, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        twin.leases(**wrong)


@story
async def test_going_on_needs_a_ledger(twin: AnyTwin) -> None:
    goes_on = Policy(ttl=TTL, renewal=CONTINUE)
    with pytest.raises(ConfigurationError, match="ledger"):
        twin.leases(policy=goes_on)
    with pytest.raises(ConfigurationError, match="ledger"):
        twin.leases(policy=lambda: goes_on)
    leases = twin.leases()
    with pytest.raises(ConfigurationError, match="ledger"):
        leases.policy = goes_on
    assert leases.policy == Policy(ttl=TTL)
    with pytest.raises(ConfigurationError, match="ledger"):
        await twin.do(leases.acquire("a", renewal=CONTINUE))
    with pytest.raises(ConfigurationError, match="ledger"):
        await twin.do(leases.try_acquire("a", renewal=CONTINUE))
    assert twin.backend.asked == []
    with_ledger = twin.leases(ledger=True, policy=goes_on)
    with_ledger.policy = lambda: goes_on
    assert await twin.do(with_ledger.acquire("a", renewal=CONTINUE))


# The policy


@story
async def test_a_policy_callable_is_asked_at_each_decision(twin: AnyTwin) -> None:
    flag = {"ttl": 9.0}
    leases = twin.leases(policy=lambda: Policy(ttl=flag["ttl"]))
    assert (await twin.do(leases.acquire("a"))).ttl == 9.0
    flag["ttl"] = 60.0
    assert (await twin.do(leases.acquire("b"))).ttl == 60.0
    assert leases.policy == Policy(ttl=60.0)


@story
async def test_a_policy_callable_that_fails_leaves_the_last_good_one_in_force(twin: AnyTwin) -> None:
    answers: list[Callable[[], Any]] = [lambda: Policy(ttl=20.0)]

    def policy() -> Policy:
        newest: Policy = answers[-1]()
        return newest

    leases = twin.leases(policy=policy)
    for broken in (lambda: 1 / 0, lambda: "not a policy", lambda: Policy(ttl=5.0, renewal=CONTINUE)):
        answers.append(broken)
        assert (await twin.do(leases.acquire(str(len(answers))))).ttl == 20.0
    assert {event.callback for event in twin.told(CallbackFailed)} == {"policy"}
    assert "ZeroDivisionError" in twin.told(CallbackFailed)[0].error
    answers.append(lambda: Policy(ttl=30.0))
    assert (await twin.do(leases.acquire("good again"))).ttl == 30.0


@story
async def test_switching_the_policy_is_told(twin: AnyTwin) -> None:
    leases = twin.leases()
    leases.policy = Policy(ttl=20.0)
    assert leases.policy == Policy(ttl=20.0)
    [switched] = twin.told(PolicySwitched)
    assert "ttl=20.0" in switched.policy
    with pytest.raises(ConfigurationError):
        leases.policy = "fast"
    assert leases.policy == Policy(ttl=20.0)
    assert len(twin.told(PolicySwitched)) == 1


@story
async def test_a_policy_switched_to_going_on_while_held_counts_at_the_next_failure(twin: AnyTwin) -> None:
    leases = twin.leases(ledger=True)
    lease = await twin.do(leases.acquire("a"))
    twin.backend.fail_next(100)
    await twin.advance(5.5)
    leases.policy = Policy(ttl=TTL, renewal=CONTINUE)
    await twin.advance(60.0)
    lease.check()
    assert [event.policy for event in twin.told(Abandoned)] == ["continue"]
    twin.ledger.assert_current(lease.grant)


@story
async def test_what_a_call_says_beats_the_policy(twin: AnyTwin) -> None:
    leases = twin.leases(ledger=True, policy=Policy(ttl=TTL, renewal=CONTINUE))
    lease = await twin.do(leases.acquire("a", renewal=Renewal(failures=1)))
    twin.backend.fail_next(100)
    await twin.advance(4.0)
    assert lease.lost.reason == "abandoned"


# Events


@story
async def test_a_whole_life_is_told_in_order(twin: AnyTwin) -> None:
    twin.dead_holder("a")
    leases = twin.leases()
    assert await twin.do(leases.try_acquire("a")) is None
    async with twin.inside(lambda: leases.acquire("a", wait=20.0)):
        twin.backend.fail_next(1)
        await twin.advance(6.0)
    lease = await twin.do(leases.acquire("a"))
    await twin.supersede(lease)
    await twin.advance(3.0)
    assert twin.names() == [
        "lease.unavailable",
        "lease.orphan_found",
        "lease.acquired",
        "lease.renewal_failed",
        "lease.renewed",
        "lease.released",
        "lease.acquired",
        "lease.not_held",
        "lease.lost",
    ]
    assert {event.namespace for event in twin.events} == {"test"}
    assert {event.resource for event in twin.events} == {"a"}


@story
async def test_an_observer_that_raises_never_reaches_the_caller(
    twin: AnyTwin, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("this observer is broken")

    leases = twin.leases(observers=[broken, twin.events.append])
    async with twin.inside(lambda: leases.acquire("a")):
        await twin.advance(3.0)
    assert twin.names() == ["lease.acquired", "lease.renewed", "lease.released"]
    assert len(caplog.records) == 3
    assert "lease.acquired" in caplog.messages[0]


@story
async def test_an_observer_that_says_what_it_wants_gets_only_that(twin: AnyTwin) -> None:
    class Picky:
        wants = (Released, Lost)

        def __init__(self) -> None:
            self.seen: list[Event] = []

        def __call__(self, event: Event) -> None:
            self.seen.append(event)

    picky = Picky()
    leases = twin.leases(observers=[picky])
    async with twin.inside(lambda: leases.acquire("a")):
        await twin.advance(3.0)
    assert [event.name for event in picky.seen] == ["lease.released"]


@story
async def test_without_observers_warnings_are_logged_and_nothing_else(
    twin: AnyTwin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    leases = twin.leases(observers=None)
    async with twin.inside(lambda: leases.acquire("fine")):
        await twin.advance(3.0)
    lease = await twin.do(leases.acquire("a"))
    await twin.supersede(lease)
    await twin.advance(3.0)
    ours = [record for record in caplog.records if record.name == "fencing"]
    assert [(record.levelname, record.getMessage().split()[0]) for record in ours] == [
        ("WARNING", "lease.not_held"),
        ("ERROR", "lease.lost"),
    ]
    lost = ours[-1]
    assert isinstance(lost.fencing_event, Lost)  # type: ignore[attr-defined]
    assert lost.getMessage() == (
        f"lease.lost namespace='test' resource='a' holder='{lease.holder}' token={lease.token} "
        f"label='me:1' reason='superseded' held_for={lost.fencing_event.held_for!r}"  # type: ignore[attr-defined]
    )


@story
async def test_a_logging_observer_shows_all_when_asked_to(
    twin: AnyTwin, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("my.own")
    caplog.set_level(logging.DEBUG, logger="my.own")
    leases = twin.leases(observers=[LoggingObserver(logger, level=logging.DEBUG)])
    async with twin.inside(lambda: leases.acquire("a")):
        pass
    assert [(record.name, record.levelno) for record in caplog.records] == [("my.own", logging.DEBUG)] * 2
    assert caplog.messages[0].startswith("lease.acquired namespace='test' resource='a' ")


@story
async def test_a_logging_observer_makes_no_text_that_nobody_reads(twin: AnyTwin) -> None:
    class Quiet(logging.Logger):
        def isEnabledFor(self, level: int) -> bool:
            return False

        def log(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("nobody listens")

    leases = twin.leases(observers=[LoggingObserver(Quiet("quiet"), level=logging.DEBUG)])
    async with twin.inside(lambda: leases.acquire("a")):
        pass


# Loss


@story
async def test_loss_is_sticky_the_same_error_at_every_use(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.clock.pause(TTL)
    lost = lease.lost
    assert (lost.reason, lost.resource) == ("expired", "a")
    for use in (lease.check, lease.renew, lambda: lease.extend(5.0)):
        with pytest.raises(LeaseLost) as caught:
            await twin.do(use())
        assert caught.value is lost
    assert (lease.lost, lease.held, lease.time_left) == (lost, False, 0.0)


@story
async def test_a_lease_that_runs_out_inside_its_block_is_not_released(twin: AnyTwin) -> None:
    """Nothing is sent: somebody else may hold it by now."""
    async with twin.inside(lambda: twin.leases().acquire("a")) as lease:
        twin.clock.pause(TTL)
        assert lease.lost
    assert twin.asked(Release) == 0


@story
async def test_a_lost_lease_can_be_acquired_again_in_the_same_thread_or_task(twin: AnyTwin) -> None:
    leases = twin.leases()
    lease = await twin.do(leases.acquire("a"))
    twin.clock.pause(TTL)
    assert lease.lost
    assert (await twin.do(leases.acquire("a"))).token > lease.token


@story
async def test_a_lease_that_ran_out_unnoticed_can_be_acquired_again(twin: AnyTwin) -> None:
    """A loop that takes its lease each tick wakes up from a pause before the renewer does."""
    leases = twin.leases()
    await twin.do(leases.acquire("a", hold_to_ttl=True))
    twin.clock.pause(TTL + 1)
    await twin.do(leases.acquire("a", hold_to_ttl=True))


def test_entering_a_lost_lease_raises_under_asyncio() -> None:
    async def whole() -> None:
        twin = Tasks()
        lease = await twin.leases().acquire("a")
        twin.clock.pause(TTL)
        assert lease.lost
        with pytest.raises(LeaseLost):
            async with lease:
                pytest.fail("was let in")

    asyncio.run(whole())


def test_entering_a_lost_lease_raises_in_a_thread() -> None:
    twin = Threads()
    lease = twin.leases().acquire("a")
    twin.clock.pause(TTL)
    assert lease.lost
    with pytest.raises(LeaseLost), lease:
        pass


@story
async def test_entering_a_lease_that_ran_out_unnoticed_raises(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.clock.pause(TTL)
    with pytest.raises(LeaseLost):
        async with twin.inside(lambda: lease):
            pass


# asyncio: loss cancels the task inside


def lose_soon(twin: Tasks, lease: AsyncLease) -> "asyncio.Task[None]":
    """Another task in which the lease is found superseded."""

    async def lose() -> None:
        await supersede_async(lease)
        await twin.clock.advance_async(3.0)

    return asyncio.create_task(lose())


def test_on_loss_the_task_inside_is_cancelled_and_the_block_raises_the_reason() -> None:
    async def whole() -> None:
        twin, reached = Tasks(), False
        with pytest.raises(LeaseLost) as caught:
            async with twin.leases().acquire("a") as lease:
                losing = lose_soon(twin, lease)
                await asyncio.Event().wait()
                reached = True
        assert not reached
        assert caught.value is lease.lost
        assert caught.value.reason == "superseded"
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert "superseded" in str(caught.value.__cause__) or "somebody else" in str(caught.value.__cause__)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await losing
        await asyncio.sleep(0)  # a task that is still being cancelled would be so here
        assert twin.asked(Release) == 1  # of the superseder's making; none by the block

    asyncio.run(whole())


def test_a_loss_noticed_in_another_thread_cancels_the_task_inside() -> None:
    async def whole() -> None:
        twin = Tasks()
        with pytest.raises(LeaseLost) as caught:
            async with twin.leases().acquire("a") as lease:
                twin.clock.pause(TTL)
                with pytest.raises(LeaseLost):
                    await asyncio.to_thread(lease.check)
                await asyncio.Event().wait()
        assert caught.value.reason == "expired"

    asyncio.run(whole())


def test_a_loss_noticed_by_the_task_itself_raises_where_it_was_noticed() -> None:
    async def whole() -> None:
        twin = Tasks()
        noticed = False
        with pytest.raises(LeaseLost):
            async with twin.leases().acquire("a") as lease:
                twin.clock.pause(TTL)
                try:
                    lease.check()
                except LeaseLost:
                    await settled()  # not cancelled on top of it
                    noticed = True
                    raise
        assert noticed
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    asyncio.run(whole())


def test_a_lease_held_without_a_block_cancels_nobody() -> None:
    async def whole() -> None:
        twin = Tasks()
        lease = await twin.leases().acquire("a")
        await lose_soon(twin, lease)
        await settled()
        assert lease.lost

    asyncio.run(whole())


def test_a_task_that_has_left_the_block_is_not_cancelled() -> None:
    async def whole() -> None:
        twin = Tasks()
        async with twin.leases().acquire("a", hold_to_ttl=True) as lease:
            pass
        await asyncio.create_task(twin.clock.advance_async(TTL + 1))
        await settled()
        assert not lease.held

    asyncio.run(whole())


def test_a_task_that_has_left_the_block_is_not_cancelled_when_the_lease_runs_out_later() -> None:
    async def whole() -> None:
        twin = Tasks()
        async with twin.leases().acquire("a") as lease:
            twin.backend.fail_next(3)
        assert lease.held  # the release did not arrive
        twin.clock.pause(TTL)
        with pytest.raises(LeaseLost):
            await asyncio.to_thread(lease.check)
        await settled()

    asyncio.run(whole())


def test_a_task_that_is_being_cancelled_can_still_hold_a_lease_and_lose_it() -> None:
    """As when it tidies up: the cancellation that was there before is not the lease's."""

    async def whole() -> None:
        twin, seen = Tasks(), []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                try:
                    async with twin.leases().acquire("a") as lease:
                        lose_soon(twin, lease)
                        await asyncio.Event().wait()
                except LeaseLost as lost:
                    seen.append(lost.reason)
                raise

        task = asyncio.create_task(work())
        await settled()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert seen == ["superseded"]

    asyncio.run(whole())


def test_a_cancellation_from_outside_wins_over_the_loss() -> None:
    async def whole() -> None:
        twin = Tasks()
        inside = asyncio.Event()
        leases = twin.leases()
        held: list[AsyncLease] = []

        async def work() -> None:
            async with leases.acquire("a") as lease:
                held.append(lease)
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        await supersede_async(held[0])
        losing = asyncio.create_task(twin.clock.advance_async(3.0))
        while held[0].lost is None:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task, losing})
        assert task.cancelled()
        assert held[0].lost is not None

    asyncio.run(whole())


def test_a_cancellation_from_outside_alone_is_a_cancellation_and_releases() -> None:
    async def whole() -> None:
        twin = Tasks()
        inside = asyncio.Event()

        async def work() -> None:
            async with twin.leases().acquire("a"):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert twin.holder_of("a") is None

    asyncio.run(whole())


def test_an_error_of_the_body_beats_the_loss_and_the_task_is_not_left_cancelling() -> None:
    async def whole() -> None:
        twin = Tasks()
        with pytest.raises(ValueError, match="while being cancelled"):
            async with twin.leases().acquire("a") as lease:
                lose_soon(twin, lease)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise ValueError("while being cancelled") from None
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    asyncio.run(whole())


@pytest.mark.parametrize("lose", ["inner", "outer", "both"])
def test_nested_leases_raise_for_the_one_that_was_lost(lose: str) -> None:
    async def whole() -> None:
        twin = Tasks()
        leases = twin.leases()
        with pytest.raises(LeaseLost) as caught:
            async with leases.acquire("outer") as outer, leases.acquire("inner") as inner:
                for lease in (outer, inner):
                    if lose in (lease.resource, "both"):
                        await supersede_async(lease)
                asyncio.create_task(twin.clock.advance_async(3.0))  # noqa: RUF006
                await asyncio.Event().wait()
        assert caught.value.resource == ("inner" if lose == "inner" else "outer")
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        assert twin.holder_of("inner") != inner.holder
        assert twin.holder_of("outer") != outer.holder

    asyncio.run(whole())


def test_a_timeout_inside_the_block_is_a_timeout() -> None:
    async def whole() -> None:
        twin = Tasks()
        async with twin.leases().acquire("a") as lease:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            lease.check()
        assert twin.holder_of("a") is None

    asyncio.run(whole())


def test_a_timeout_around_the_block_is_a_timeout_and_releases() -> None:
    async def whole() -> None:
        twin = Tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), twin.leases().acquire("a"):
                await asyncio.Event().wait()
        assert twin.holder_of("a") is None

    asyncio.run(whole())


def test_a_loss_inside_a_timeout_is_a_loss() -> None:
    async def whole() -> None:
        twin = Tasks()
        with pytest.raises(LeaseLost):
            async with asyncio.timeout(SOON) as outer, twin.leases().acquire("a") as lease:
                lose_soon(twin, lease)
                async with asyncio.timeout(SOON) as inner:
                    await asyncio.Event().wait()
        assert (outer.expired(), inner.expired()) == (False, False)
        async with asyncio.timeout(SOON):
            await asyncio.sleep(0)

    asyncio.run(whole())


def test_a_loss_in_a_task_group_stops_the_group() -> None:
    async def whole() -> None:
        twin = Tasks()
        stopped: list[bool] = []

        async def helper() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append(True)

        with pytest.raises(LeaseLost):
            async with twin.leases().acquire("a") as lease, asyncio.TaskGroup() as group:
                group.create_task(helper())
                lose_soon(twin, lease)
                await asyncio.Event().wait()
        assert stopped == [True]

    asyncio.run(whole())


def test_a_coroutine_function_may_be_told_of_the_loss() -> None:
    async def whole() -> None:
        twin = Tasks()
        told: list[LeaseLost] = []

        async def on_lost(lost: LeaseLost) -> None:
            await asyncio.sleep(0)
            told.append(lost)

        async def broken(lost: LeaseLost) -> None:
            raise RuntimeError("this callback is broken")

        leases = twin.leases()
        good, bad = await leases.acquire("a", on_lost=on_lost), await leases.acquire("b", on_lost=broken)
        await supersede_async(good)
        await supersede_async(bad)
        await twin.clock.advance_async(3.0)
        await settled()
        assert told == [good.lost]
        assert [event.resource for event in twin.told(CallbackFailed)] == ["b"]

    asyncio.run(whole())


def test_a_loss_noticed_after_the_event_loop_was_closed_is_a_loss() -> None:
    twin = Tasks()

    async def take() -> AsyncLease:
        return await twin.leases().acquire("a")

    lease = asyncio.run(take())
    twin.clock.pause(TTL)
    with pytest.raises(LeaseLost):
        lease.check()


# asyncio: cancelled at every await


class SlowClock(FakeClock):
    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(0)
        await super().sleep_async(seconds)
        await asyncio.sleep(0)


class SlowBackend(AsyncMemoryBackend):
    """A request takes its time on the way there and on the way back."""

    async def ask(self, command: Command, timeout: float) -> Reply:
        await settled(3)
        reply = await super().ask(command, timeout)
        await settled(2)
        return reply


class SlowLedger(AsyncMemoryLedger):
    async def claim(self, grant: Grant) -> Behind | None:
        await asyncio.sleep(0)
        behind = await super().claim(grant)
        await asyncio.sleep(0)
        return behind


class SlowTasks(Tasks):
    """Everything takes several turns of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SlowClock()
        self.backend = MemoryBackend(self.clock)
        self.async_backend = SlowBackend(sync=self.backend)

    def slow_leases(self) -> AsyncLeases:
        return AsyncLeases(self.async_backend, ledger=SlowLedger(self.ledger), **self.settings({}))


def nothing_special(twin: SlowTasks) -> None:
    pass


def busy_at_first(twin: SlowTasks) -> None:
    twin.dead_holder("a", ttl=0.05)


def answers_lost(twin: SlowTasks) -> None:
    twin.backend.lose_replies(2)


def requests_failing(twin: SlowTasks) -> None:
    twin.backend.fail_next(2)


def ledger_ahead(twin: SlowTasks) -> None:
    twin.ledger.rows["test", "a"] = (int(twin.clock.wall() * 1e6) + 10, "f" * 32)


TROUBLES = [nothing_special, busy_at_first, answers_lost, requests_failing, ledger_ahead]


async def cancel_acquire(prepare: Callable[[SlowTasks], None], *after: int) -> bool:
    """Cancel an acquire after so many turns of the loop, and again; whether that was before its end."""
    twin = SlowTasks()
    prepare(twin)
    leases = twin.slow_leases()

    async def take() -> AsyncLease:
        return await leases.acquire("a", wait=20.0)

    task = asyncio.create_task(take())
    for turns in after:
        await settled(turns)
        if task.done() and not task.cancelled():
            assert task.result().held
            return False
        task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    held_by: Any = twin.backend._answer(Peek(Target("test", ("a",))))
    assert held_by.held_by is None or held_by.held_by.label == "dead:1", f"left a lease, cancelled at {after}"
    assert leases.gate._inside == {}
    assert leases._renewer.leases() == []
    return True


async def cancel_acquire_everywhere(prepare: Callable[[SlowTasks], None]) -> int:
    turns = 0
    while await cancel_acquire(prepare, turns):
        turns += 1
    return turns


@pytest.mark.parametrize("prepare", TROUBLES)
def test_an_acquire_cancelled_at_any_await_leaves_no_lease(prepare: Callable[[SlowTasks], None]) -> None:
    assert asyncio.run(cancel_acquire_everywhere(prepare)) >= 4


@pytest.mark.parametrize("prepare", TROUBLES)
def test_an_acquire_cancelled_twice_leaves_no_lease(prepare: Callable[[SlowTasks], None]) -> None:
    async def whole() -> None:
        for first in range(1, await cancel_acquire_everywhere(prepare)):
            for second in range(1, 5):
                await cancel_acquire(prepare, first, second)

    asyncio.run(whole())


def never_gives_back(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
    """The acquire flow, with its giving back taken out."""
    flow = acquire(*args, **kwargs)
    answer: Any = None
    while True:
        try:
            step = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Ask) and isinstance(step.command, Release):
            answer = Done()
            continue
        try:
            answer = yield step
        except BaseException as error:
            answer = error


def test_the_check_of_cancelled_acquires_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencing.lease_async.acquire", never_gives_back)
    with pytest.raises(AssertionError, match="left a lease"):
        asyncio.run(cancel_acquire_everywhere(nothing_special))


def test_the_check_of_acquires_cancelled_twice_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gives_in(self: AsyncLeases, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    monkeypatch.setattr(AsyncLeases, "_insist", gives_in)
    with pytest.raises(AssertionError, match="left a lease"):
        test_an_acquire_cancelled_twice_leaves_no_lease(nothing_special)


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize("way", ["explicit", "block"])
def test_a_release_cancelled_at_any_await_is_released_all_the_same(way: str, cancels: int) -> None:
    async def attempt(turns: int) -> bool:
        twin = SlowTasks()
        leases = twin.slow_leases()
        lease = await leases.acquire("a")

        async def let_go() -> None:
            if way == "explicit":
                await lease.release()
            else:
                async with lease:
                    pass

        task = asyncio.create_task(let_go())
        for _ in range(cancels):
            await settled(turns)
            if task.done():
                break
            task.cancel()
        await asyncio.wait({task})
        assert twin.holder_of("a") is None
        assert leases.gate._inside == {}
        return task.cancelled()

    async def whole() -> int:
        turns = 1
        while await attempt(turns):
            turns += 1
        return turns

    assert asyncio.run(whole()) >= 3


def test_a_cancelled_release_that_was_carried_out_is_told_as_released() -> None:
    async def whole() -> None:
        twin = SlowTasks()
        lease = await twin.slow_leases().acquire("a")
        task = asyncio.create_task(lease.release())
        await settled(1)
        task.cancel()
        await asyncio.wait({task})
        assert twin.holder_of("a") is None
        assert not lease.held
        assert twin.told(ReleaseFailed) == []

    asyncio.run(whole())


def test_who_is_turned_away_while_another_task_is_asking_is_told_so() -> None:
    """Nobody holds it yet, and nobody has lost it."""

    async def whole() -> None:
        twin = SlowTasks()
        leases = twin.slow_leases()

        async def take(wait: float) -> AsyncLease:
            return await leases.acquire("a", wait=wait)

        first = asyncio.create_task(take(5.0))
        await settled(1)
        with pytest.raises(LeaseUnavailable) as caught:
            await take(0.0)
        assert "lost" not in str(caught.value)
        await first

    asyncio.run(whole())


def test_ctrl_c_during_an_acquire_gives_back() -> None:
    """The thread's part of the same promise: the answer is on its way when the interrupt comes."""
    twin = Threads()

    class Interrupted(MemoryBackend):
        def ask(self, command: Command, timeout: float) -> Reply:
            reply = super().ask(command, timeout)
            if isinstance(command, Acquire):
                raise KeyboardInterrupt
            return reply

    twin.backend = Interrupted(twin.clock)
    leases = twin.leases()
    with pytest.raises(KeyboardInterrupt):
        leases.acquire("a")
    assert twin.holder_of("a") is None
    assert [event.cause for event in twin.told(GivenBack)] == ["KeyboardInterrupt"]
    assert leases.gate._inside == {}


def test_ctrl_c_during_a_release_releases_all_the_same() -> None:
    twin = Threads()

    class Interrupted(MemoryBackend):
        interrupts = 1

        def ask(self, command: Command, timeout: float) -> Reply:
            if isinstance(command, Release) and self.interrupts:
                self.interrupts = 0
                raise KeyboardInterrupt
            return super().ask(command, timeout)

    twin.backend = Interrupted(twin.clock)
    with pytest.raises(KeyboardInterrupt), twin.leases().acquire("a"):
        pass
    assert twin.holder_of("a") is None


def test_an_acquisition_under_asyncio_begins_when_it_is_awaited() -> None:
    async def whole() -> None:
        twin = Tasks()
        leases = twin.leases()
        acquiring = leases.acquire("a")
        assert twin.backend.asked == []
        assert "awaited" in repr(acquiring)
        lease = await acquiring
        assert lease.held
        del acquiring
        with pytest.warns(RuntimeWarning, match="never awaited"):
            leases.acquire("b")

    asyncio.run(whole())
