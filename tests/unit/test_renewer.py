"""Renewal in the background: when, how many at once, and what comes of failures."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import pytest

from fencing import (
    AsyncLeases,
    BackendUnavailable,
    FencingError,
    LeaseLost,
    LeaseNotHeld,
    Leases,
    Policy,
    Renewal,
    StaleToken,
    renewal,
)
from fencing.backends.base import Command, Release, Renew, Reply
from fencing.events import Abandoned, CallbackFailed, Event, Lost, RenewalFailed, RenewalStopped, Renewed
from fencing.renewal import Wheel
from fencing.tenure import Tenure
from fencing.testing import (
    AsyncMemoryBackend,
    AsyncMemoryLedger,
    FakeClock,
    MemoryBackend,
    MemoryLedger,
    supersede,
    supersede_async,
)

TTL = 9.0
FENCE, CONTINUE = Renewal(failures=3), Renewal(failures=3, on_failure="continue")
SOON = 30.0  # seconds after which a test that waits for another thread gives up


# The wheel


class Thing:
    """Something that can be filed."""

    _slot = 0.0


def test_what_is_due_is_taken_out_and_what_is_not_stays() -> None:
    wheel: Wheel[Any] = Wheel()
    early, late = Thing(), Thing()
    wheel.put(early, 10.0, 0.1)
    wheel.put(late, 20.0, 0.1)
    assert wheel.due(9.8) == []
    assert wheel.due(10.0) == [early]
    assert wheel.due(10.0) == []
    assert wheel.leases() == [late]
    assert wheel.due(100.0) == [late]
    assert wheel.leases() == []


def test_a_thing_is_due_a_grain_early_at_most_and_never_late() -> None:
    wheel: Wheel[Any] = Wheel()
    for at in (10.0, 10.04, 10.0999, 1003.0, 1_800_000.123):
        slot = wheel.put(Thing(), at, 0.1)
        assert at - 0.1 - 1e-9 <= slot <= at


def test_the_wheel_says_when_the_next_is_due() -> None:
    wheel: Wheel[Any] = Wheel()
    assert wheel.next() is None
    late, early = Thing(), Thing()
    wheel.put(late, 20.0, 0.5)
    wheel.put(early, 10.0, 0.5)
    assert wheel.next() == 10.0
    wheel.drop(early)
    assert wheel.next() == 20.0
    wheel.drop(late)
    assert wheel.next() is None


def test_what_was_dropped_is_not_due() -> None:
    wheel: Wheel[Any] = Wheel()
    kept, dropped = Thing(), Thing()
    wheel.put(kept, 10.0, 0.1)
    wheel.put(dropped, 10.0, 0.1)
    wheel.drop(dropped)
    wheel.drop(dropped)
    wheel.drop(Thing())
    assert wheel.due(10.0) == [kept]


def test_a_thing_filed_twice_is_due_once() -> None:
    wheel: Wheel[Any] = Wheel()
    thing = Thing()
    wheel.put(thing, 10.0, 0.1)
    wheel.put(thing, 20.0, 0.1)
    assert wheel.due(15.0) == []
    assert wheel.due(20.0) == [thing]


def test_thousands_of_things_put_and_dropped_leave_nothing_behind() -> None:
    wheel: Wheel[Any] = Wheel()
    most = 0
    for number in range(20_000):
        thing, now = Thing(), number * 0.001
        wheel.put(thing, now + 10.0, 0.1)
        wheel.drop(thing)
        wheel.due(now)
        most = max(most, len(wheel._slots))
        assert len(wheel._heap) == len(wheel._slots)
    assert most <= 10.0 / 0.1 + 2  # one slot a grain of the time ahead, however many things there were
    assert wheel.next() is None
    assert (wheel._slots, wheel._heap) == ({}, [])


# Leases of both kinds on a clock that is moved


class Spy(MemoryBackend):
    """Writes down when each request came, and how many came together."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.times: list[tuple[float, Command]] = []
        self.batches: list[int] = []
        self.bounds: list[float] = []
        self.broken: set[str] = set()

    def ask(self, command: Command, timeout: float) -> Reply:
        self.times.append((self.clock.now() - 1000.0, command))
        if command.target.name in self.broken:
            raise BackendUnavailable("this resource's shard is down", sent=False)
        return super().ask(command, timeout)

    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        self.batches.append(len(commands))
        self.bounds.append(timeout)
        return super().ask_many(commands, timeout)

    def when(self, kind: type[Command]) -> list[float]:
        return [at for at, command in self.times if isinstance(command, kind)]


class Twin:
    """Leases on one fake clock, with the same words for threads and asyncio."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.backend = Spy(self.clock)
        self.ledger = MemoryLedger()
        self.events: list[tuple[float, Event]] = []

    def observe(self, event: Event) -> None:
        self.events.append((self.clock.now() - 1000.0, event))

    def told(self, *kinds: type[Event]) -> list[Any]:
        return [event for _, event in self.events if not kinds or type(event) in kinds]

    def names(self) -> list[str]:
        return [event.name for _, event in self.events]


class Threads(Twin):
    def leases(self, **settings: Any) -> Leases:
        settings = {"observers": [self.observe], "ledger": self.ledger, "policy": Policy(ttl=TTL)} | settings
        return Leases(self.backend, namespace="test", **settings)

    async def do(self, value: Any) -> Any:
        return value

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def supersede(self, lease: Any) -> Any:
        return supersede(lease)

    async def settle(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "fencing-on-lost":
                thread.join(SOON)

    def inside(self, lease: Any) -> "Inside":
        return Inside(lease)

    def interrupted(self) -> AbstractContextManager[object]:
        """A thread is never interrupted by a loss."""
        return nullcontext()

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(StopIteration):
            story.send(None)


class Tasks(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.async_backend = AsyncMemoryBackend(sync=self.backend)

    def leases(self, **settings: Any) -> AsyncLeases:
        settings = {
            "observers": [self.observe],
            "ledger": AsyncMemoryLedger(self.ledger),
            "policy": Policy(ttl=TTL),
        } | settings
        return AsyncLeases(self.async_backend, namespace="test", **settings)

    async def do(self, value: Any) -> Any:
        return await value

    async def advance(self, seconds: float) -> None:
        await self.clock.advance_async(seconds)

    async def supersede(self, lease: Any) -> Any:
        return await supersede_async(lease)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def inside(self, lease: Any) -> Any:
        return lease

    def interrupted(self) -> AbstractContextManager[object]:
        """A task is, and its block raises."""
        return pytest.raises(LeaseLost)

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        asyncio.run(story)


class Inside:
    """A `with` block that reads as ``async with``."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease

    async def __aenter__(self) -> Any:
        return self._lease.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.__exit__(kind, error, trace)


KINDS: list[type[Threads] | type[Tasks]] = [Threads, Tasks]
AnyTwin = Threads | Tasks


@pytest.fixture(params=KINDS, ids=["threads", "asyncio"])
def twin(request: pytest.FixtureRequest) -> AnyTwin:
    return request.param()


def story(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Tell the test to both twins: for threads its coroutine never waits, for asyncio it does."""

    @functools.wraps(test)
    def told(twin: AnyTwin, **arguments: Any) -> None:
        twin.run(test(twin, **arguments))

    assert next(iter(inspect.signature(test).parameters)) == "twin"
    return told


def early(*times: float) -> list[Any]:
    """A renewal may be sent a little before it is due, and the next one counts from there."""
    return [pytest.approx(at - 0.06, abs=0.061) for at in times]


# When


@story
async def test_a_lease_is_renewed_at_each_third_of_its_ttl(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(2.9)
    assert twin.backend.when(Renew) == []
    await twin.advance(0.1)
    assert twin.backend.when(Renew) == early(3.0)
    await twin.advance(9.0)
    assert twin.backend.when(Renew) == early(3.0, 6.0, 9.0, 12.0)
    assert lease.held
    assert lease.time_left == pytest.approx(TTL, abs=0.1)


@story
async def test_a_renewed_lease_outlives_its_ttl_by_far(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(1000)
    lease.check()
    assert (await twin.do(twin.leases().peek("a"))).holder == lease.holder
    assert 330 <= len(twin.told(Renewed)) <= 350


@story
async def test_what_is_due_together_is_renewed_in_one_batch(twin: AnyTwin) -> None:
    leases = twin.leases()
    held = [await twin.do(leases.acquire(f"r{number}")) for number in range(300)]
    await twin.advance(3.0)
    assert twin.backend.batches == [300]
    assert all(lease.held for lease in held)


@story
async def test_leases_of_one_backend_share_a_renewer_across_namespaces(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    await twin.do(twin.leases().acquire("b"))
    await twin.advance(3.0)
    assert twin.backend.batches == [2]


@story
async def test_batches_of_different_bounds_go_separately_the_shortest_first(twin: AnyTwin) -> None:
    leases = twin.leases()
    await twin.do(leases.acquire("long", ttl=90))
    await twin.do(leases.acquire("short", ttl=4.5))
    twin.clock.pause(4.4)
    await twin.advance(26)
    assert twin.backend.bounds[0] == pytest.approx(0.5)
    assert max(twin.backend.bounds) == 2.0


@story
async def test_hundreds_of_leases_acquired_one_after_the_other_are_all_kept(twin: AnyTwin) -> None:
    leases = twin.leases()
    held = []
    for number in range(400):
        held.append(await twin.do(leases.acquire(f"r{number}")))
        await twin.advance(0.01)
    await twin.advance(60)
    assert all(lease.held for lease in held)
    assert twin.told(Lost, RenewalFailed) == []
    assert len(twin.backend.batches) < len(twin.told(Renewed)) / 2  # what is nearly due goes along


@story
async def test_lateness_is_told(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    await twin.advance(0)
    twin.clock.pause(5.0)
    await twin.advance(0)
    [renewed] = twin.told(Renewed)
    assert renewed.late == pytest.approx(2.0)
    assert renewed.took == 0.0


@story
async def test_a_punctual_renewal_is_not_late(twin: AnyTwin) -> None:
    await twin.do(twin.leases().acquire("a"))
    await twin.advance(30)
    assert {event.late for event in twin.told(Renewed)} == {0.0}


@story
async def test_the_deadline_counts_from_when_a_renewal_was_sent(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(3.0)
    [sent] = twin.backend.when(Renew)
    assert lease.grant.deadline == 1000.0 + sent + TTL


@story
async def test_a_released_lease_is_not_renewed_any_more(twin: AnyTwin) -> None:
    leases = twin.leases()
    released, kept = [await twin.do(leases.acquire(name)) for name in ("a", "b")]
    await twin.advance(3.0)
    assert twin.backend.batches == [2]
    await twin.do(released.release())
    await twin.advance(30.0)
    assert set(twin.backend.batches[1:]) == {1}
    assert leases._renewer.leases() == [kept]


@story
async def test_thousands_of_short_leases_leave_the_renewer_empty(twin: AnyTwin) -> None:
    leases = twin.leases()
    for number in range(2000):
        lease = await twin.do(leases.acquire("a"))
        if number % 2:
            await twin.advance(0.01)  # filed in the wheel
        await twin.do(lease.release())
    await twin.advance(TTL)
    assert leases._renewer.leases() == []
    assert leases._renewer._wheel._slots == {}


@story
async def test_a_lease_held_to_its_ttl_is_never_renewed(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", hold_to_ttl=True))
    await twin.advance(8.9)
    assert lease.held
    await twin.advance(0.2)
    assert twin.backend.when(Renew) == []
    assert lease.lost.reason == "expired"


@story
async def test_an_extended_lease_is_renewed_to_its_new_ttl(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.do(lease.extend(90.0))
    assert (lease.ttl, lease.time_left) == (90.0, 90.0)
    await twin.advance(29.5)
    assert twin.backend.when(Renew) == [0.0]
    await twin.advance(0.6)
    assert twin.backend.when(Renew) == [0.0, *early(30.0)]
    assert twin.backend.times[-1][1].ttl_ms == 90_000  # type: ignore[union-attr]


@story
async def test_a_lease_extended_to_less_is_renewed_in_time(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", ttl=300))
    await twin.do(lease.extend(TTL))
    await twin.advance(60)
    assert lease.held


@story
async def test_a_lease_extended_to_less_wakes_the_renewer(twin: AnyTwin) -> None:
    """With a real clock the renewer sleeps until the first `early` it knows of."""
    lease = await twin.do(twin.leases().acquire("a", ttl=300))
    await twin.do(lease.extend(TTL))
    due, _ = lease._next_due()
    assert lease._early <= due


# Failures


@pytest.mark.parametrize("how", ["fail_next", "lose_replies"])
@story
async def test_three_failures_in_a_row_abandon_the_lease_before_its_deadline(twin: AnyTwin, how: str) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=FENCE))
    getattr(twin.backend, how)(100)
    await twin.advance(TTL)
    assert twin.backend.when(Renew) == early(3.0, 5.0, 7.0)
    assert [event.failures for event in twin.told(RenewalFailed)] == [1, 2, 3]
    [abandoned] = twin.told(Abandoned)
    assert (abandoned.policy, abandoned.failures, abandoned.token) == ("fence", 3, lease.token)
    assert twin.names()[-2:] == ["lease.abandoned", "lease.lost"]
    [(lost_at, _)] = [(at, event) for at, event in twin.events if isinstance(event, Lost)]
    assert lost_at <= TTL * 8 / 9
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "abandoned"


@story
async def test_an_abandoned_lease_is_not_released_by_leaving_its_block(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=FENCE))
    twin.backend.fail_next(3)
    with twin.interrupted():
        async with twin.inside(lease):
            await twin.advance(7.5)
    assert lease.lost.reason == "abandoned"
    assert twin.backend.when(Release) == []
    assert (await twin.do(twin.leases().peek("a"))).holder == lease.holder


@story
async def test_an_abandoned_lease_cannot_be_released_nor_renewed(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=FENCE))
    twin.backend.fail_next(100)
    await twin.advance(7.5)
    twin.backend.fail_next(0)
    for use in (lease.release, lease.renew):
        with pytest.raises(LeaseLost) as caught:
            await twin.do(use())
        assert caught.value is lease.lost
    assert twin.backend.when(Release) == []
    await twin.advance(100)
    assert len(twin.backend.when(Renew)) == 3


@story
async def test_an_abandoned_lease_that_goes_on_is_counted_and_the_ledger_decides(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=CONTINUE))
    async with twin.inside(lease):
        twin.backend.fail_next(100)
        await twin.advance(TTL * 3)
        twin.backend.fail_next(0)
        assert twin.backend.when(Renew) == early(3.0, 5.0, 7.0)
        [abandoned] = twin.told(Abandoned)
        assert (abandoned.policy, abandoned.failures) == ("continue", 3)
        assert twin.told(Lost) == []
        lease.check()
        assert lease.held
        assert lease.lost is None
        twin.ledger.assert_current(lease.grant)
        await twin.supersede(lease)
        lease.check()
        with pytest.raises(StaleToken):
            twin.ledger.assert_current(lease.grant)
        asked = len(twin.backend.asked)
    assert len(twin.backend.asked) == asked
    assert twin.names()[-1] == "lease.left_to_expire"
    with pytest.raises(LeaseNotHeld):
        lease.check()


@story
async def test_a_release_of_a_lease_that_went_on_sends_nothing(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=CONTINUE))
    twin.backend.fail_next(3)
    await twin.advance(7.5)
    await twin.do(lease.release())
    assert twin.backend.when(Release) == []
    assert not lease.held


@story
async def test_a_lease_that_went_on_can_be_renewed_by_hand_when_the_backend_is_back(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=CONTINUE))
    twin.backend.fail_next(3)
    await twin.advance(7.5)
    await twin.do(lease.renew())
    assert lease.time_left == TTL
    await twin.advance(60)
    assert lease.time_left > 0
    assert twin.told(Lost) == []


@story
async def test_failures_with_a_success_between_them_never_abandon(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=FENCE))
    for _ in range(20):
        twin.backend.fail_next(2)
        await twin.advance(7.5)
    assert [event.failures for event in twin.told(RenewalFailed)] == [1, 2] * 20
    assert len(twin.told(Renewed)) >= 20
    assert twin.told(Abandoned, Lost) == []
    lease.check()


@pytest.mark.parametrize("failures", [1, 2, 5, 10])
@story
async def test_as_many_failures_as_the_policy_says_abandon(twin: AnyTwin, failures: int) -> None:
    await twin.do(twin.leases().acquire("a", renewal=Renewal(failures=failures)))
    twin.backend.fail_next(100)
    await twin.advance(TTL)
    assert len(twin.backend.when(Renew)) == failures
    assert twin.backend.when(Renew)[-1] < TTL * 8 / 9
    assert [type(event) for event in twin.told(Abandoned, Lost)] == [Abandoned, Lost]


@story
async def test_an_answer_that_the_backend_left_out_counts_as_a_failure(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.ask_many = lambda commands, timeout: ()  # type: ignore[method-assign]
    await twin.advance(TTL)
    assert [event.failures for event in twin.told(RenewalFailed)] == [1, 2, 3]
    assert lease.lost.reason == "abandoned"


@story
async def test_a_failing_renewal_of_one_lease_does_not_touch_the_others(twin: AnyTwin) -> None:
    leases = twin.leases()
    first, second, third = [await twin.do(leases.acquire(name)) for name in ("a", "b", "c")]
    twin.backend.broken.add("b")
    await twin.advance(TTL)
    assert (first.held, second.held, third.held) == (True, False, True)


# Callbacks


@story
async def test_a_broken_observer_does_not_stop_renewals(twin: AnyTwin) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("this observer is broken")

    lease = await twin.do(twin.leases(observers=[broken, twin.observe]).acquire("a"))
    await twin.advance(30)
    assert lease.held
    assert len(twin.told(Renewed)) >= 9


@story
async def test_a_broken_on_lost_callback_is_told_and_does_not_stop_renewals(twin: AnyTwin) -> None:
    def broken(lost: LeaseLost) -> None:
        raise RuntimeError("this callback is broken")

    leases = twin.leases()
    lost = await twin.do(leases.acquire("a", on_lost=broken))
    kept = await twin.do(leases.acquire("b"))
    twin.backend.expire("test", "a")
    await twin.advance(30)
    await twin.settle()
    assert (lost.held, kept.held) == (False, True)
    [failed] = twin.told(CallbackFailed)
    assert (failed.callback, failed.resource) == ("on_lost", "a")
    assert "this callback is broken" in failed.error


@story
async def test_a_broken_policy_does_not_stop_renewals(twin: AnyTwin) -> None:
    works = True

    def policy() -> Policy:
        if works:
            return Policy(ttl=TTL)
        raise RuntimeError("the feature flags are down")

    lease = await twin.do(twin.leases(policy=policy).acquire("a"))
    works = False
    await twin.advance(30)
    assert lease.held
    assert {event.callback for event in twin.told(CallbackFailed)} == {"policy"}


@story
async def test_on_lost_is_called_once_with_the_error(twin: AnyTwin) -> None:
    called: list[LeaseLost] = []
    lease = await twin.do(twin.leases().acquire("a", on_lost=called.append))
    other = await twin.supersede(lease)
    await twin.advance(3.0)
    await twin.settle()
    assert called == [lease.lost]
    with pytest.raises(LeaseLost):
        lease.check()
    with pytest.raises(LeaseNotHeld):
        await twin.do(lease.release())
    await twin.advance(60)
    await twin.settle()
    assert called == [lease.lost]
    assert other.held


@story
async def test_on_lost_is_not_called_when_nothing_was_lost(twin: AnyTwin) -> None:
    called: list[LeaseLost] = []
    async with twin.inside(await twin.do(twin.leases().acquire("a", on_lost=called.append))):
        await twin.advance(30)
    await twin.advance(30)
    await twin.settle()
    assert called == []


# Loss


@story
async def test_a_superseded_lease_is_lost_at_its_next_renewal(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    other = await twin.supersede(lease)
    lease.check()  # nobody has told it yet
    await twin.advance(3.0)
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "superseded"
    assert twin.names()[-2:] == ["lease.not_held", "lease.lost"]
    assert twin.told()[-2].held_by.holder == other.holder
    assert len(twin.told(Lost)) == 1
    await twin.advance(30)
    assert other.held


@story
async def test_a_lease_that_the_backend_forgot_is_lost_as_expired(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    twin.backend.forget()
    await twin.advance(3.0)
    assert lease.lost.reason == "expired"


@story
async def test_a_lease_that_goes_on_outlives_a_backend_that_forgot(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=CONTINUE))
    twin.backend.forget()
    await twin.advance(3.0)
    lease.check()
    assert [event.policy for event in twin.told(Abandoned)] == ["continue"]


@story
async def test_a_lease_that_goes_on_is_lost_when_another_holds_the_resource(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=CONTINUE))
    await twin.supersede(lease)
    await twin.advance(3.0)
    assert lease.lost.reason == "superseded"


@story
async def test_expiry_during_a_pause_is_noticed_without_asking_anybody(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(1)
    asked = len(twin.backend.asked)
    twin.clock.pause(TTL - 1 - 0.001)
    lease.check()
    twin.clock.pause(0.001)
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "expired"
    assert len(twin.backend.asked) == asked
    assert lease._leases._renewer.leases() == []
    await twin.advance(30)
    assert len(twin.backend.asked) == asked
    assert lease.lost is caught.value


@story
async def test_a_lease_that_expired_during_a_pause_is_not_revived_by_the_renewer(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a"))
    await twin.advance(1)
    twin.clock.pause(TTL)
    await twin.advance(0)
    assert twin.backend.when(Renew) == []
    assert [event.reason for event in twin.told(Lost)] == ["expired"]
    assert lease.lost.reason == "expired"


@story
async def test_renewal_goes_on_for_max_hold_and_no_longer(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=Renewal(max_hold=10.0)))
    await twin.advance(9.0)
    assert twin.backend.when(Renew) == early(3.0, 6.0, 9.0)
    assert [event.held_for for event in twin.told(RenewalStopped)] == early(9.0)
    await twin.advance(8.8)
    assert lease.held
    await twin.advance(0.3)
    assert lease.lost.reason == "expired"
    assert len(twin.backend.when(Renew)) == 3
    assert len(twin.told(RenewalStopped)) == 1
    [(lost_at, _)] = [(at, event) for at, event in twin.events if isinstance(event, Lost)]
    assert lost_at == pytest.approx(9.0 + TTL, abs=0.1)


@story
async def test_the_end_of_renewal_is_told_once_also_when_it_goes_on_by_hand(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=Renewal(max_hold=4.0)))
    for _ in range(4):
        await twin.advance(4.0)
        await twin.do(lease.renew())
    assert len(twin.backend.when(Renew)) == 5
    assert len(twin.told(RenewalStopped)) == 1


@story
async def test_max_hold_ends_a_lease_that_would_go_on_through_an_outage(twin: AnyTwin) -> None:
    lease = await twin.do(twin.leases().acquire("a", renewal=Renewal(max_hold=5.0, on_failure="continue")))
    await twin.advance(1000)
    assert not lease.held


@pytest.mark.parametrize("policy", ["fence", "continue"])
@story
async def test_a_policy_switched_while_held_counts_at_the_next_failure(twin: AnyTwin, policy: str) -> None:
    switched = {"fence": FENCE, "continue": CONTINUE}
    before = CONTINUE if policy == "fence" else FENCE
    leases = twin.leases(policy=Policy(ttl=TTL, renewal=before))
    lease = await twin.do(leases.acquire("a"))
    twin.backend.fail_next(100)
    await twin.advance(5.5)
    assert [event.failures for event in twin.told(RenewalFailed)] == [1, 2]
    leases.policy = Policy(ttl=TTL, renewal=switched[policy])
    await twin.advance(2)
    assert [event.policy for event in twin.told(Abandoned)] == [policy]
    assert lease.held is (policy == "continue")


# The renewers on a real clock: a thread, and a timer of the event loop


def test_a_thread_renews_and_ends_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "IDLE", 0.02)
    renewed, rested = threading.Event(), threading.Event()

    class Resting(MemoryBackend):
        def rest(self, unused_for: float = 0.0) -> None:
            if not unused_for:
                rested.set()

    def observe(event: Event) -> None:
        if isinstance(event, Renewed):
            renewed.set()

    leases = Leases(Resting(), observers=[observe])
    lease = leases.acquire("a", ttl=0.6)
    assert renewed.wait(SOON)
    assert lease.held
    lease.release()
    assert rested.wait(SOON)
    assert leases._renewer._thread is None
    renewed.clear()
    with leases.acquire("a", ttl=0.6):
        assert renewed.wait(SOON)


def test_a_renewal_whose_answer_comes_too_late_does_not_spoil_later_ones() -> None:
    """It was sent, the deadline passed, the lease went on; then somebody renews it by hand."""
    twin = Threads()
    lease = twin.leases().acquire("a", renewal=CONTINUE)
    answer = twin.backend.ask_many

    def slow(commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        answers = answer(commands, timeout)
        twin.clock.pause(7.0)
        lease.check()
        return answers

    twin.backend.ask_many = slow  # type: ignore[method-assign]
    twin.clock.pause(3.0)
    lease._leases._renewer.turn()
    assert [event.policy for event in twin.told(Abandoned)] == ["continue"]
    lease.renew()
    assert lease.time_left == TTL
    assert lease.grant.deadline == twin.clock.now() + TTL


def test_a_lease_that_comes_while_the_thread_goes_to_sleep_is_renewed_in_time() -> None:
    """Between its turn and its sleep: `rest` is called there."""
    seen: list[Event] = []
    told = threading.Event()

    class Between(MemoryBackend):
        def rest(self, unused_for: float = 0.0) -> None:
            if not later:
                later.append(leases.acquire("b", ttl=0.6))

    def observe(event: Event) -> None:
        if event.resource == "b" and isinstance(event, Renewed | Lost):
            seen.append(event)
            told.set()

    later: list[Any] = []
    leases = Leases(Between(), observers=[observe])
    leases.acquire("a", ttl=300)
    assert told.wait(SOON)
    leases.close()
    assert isinstance(seen[0], Renewed)


def test_a_turn_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    renewed = threading.Event()

    class Stumbling(MemoryBackend):
        stumbles = 1

        def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
            self.stumbles -= 1
            if self.stumbles >= 0:
                raise RuntimeError("a bug in a backend")
            return super().ask_many(commands, timeout)

    leases = Leases(Stumbling(), observers=[lambda event: event.name == "lease.renewed" and renewed.set()])
    with leases.acquire("a", ttl=0.9):
        assert renewed.wait(SOON)
    assert caplog.messages.count("a backend raised instead of answering") == 1


def test_a_rest_that_fails_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, renewed = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())

    class Restless(MemoryBackend):
        rests = 0

        def rest(self, unused_for: float = 0.0) -> None:
            self.rests += 1
            raise OSError("a socket that does not close")

    backend = Restless()

    def observe(event: Event) -> None:
        if isinstance(event, Renewed) and backend.rests >= 2:
            renewed.set()
            ended.set()

    with Leases(backend, observers=[observe]).acquire("a", ttl=0.3):
        assert ended.wait(SOON)
    Restless.rest = MemoryBackend.rest  # type: ignore[method-assign]  # or it would complain into later tests
    assert renewed.is_set()


def test_a_turn_that_fails_does_not_end_the_timer(caplog: pytest.LogCaptureFixture) -> None:
    async def whole() -> None:
        renewed = asyncio.Event()

        class Stumbling(AsyncMemoryBackend):
            stumbles = 1

            async def ask_many(
                self, commands: Sequence[Command], timeout: float
            ) -> Sequence[Reply | FencingError]:
                self.stumbles -= 1
                if self.stumbles >= 0:
                    raise RuntimeError("a bug in a backend")
                return await super().ask_many(commands, timeout)

        leases = AsyncLeases(
            Stumbling(), observers=[lambda event: event.name == "lease.renewed" and renewed.set()]
        )
        async with asyncio.timeout(SOON), leases.acquire("a", ttl=0.9):
            await renewed.wait()
        await leases.aclose()

    asyncio.run(whole())
    assert caplog.messages.count("a backend raised instead of answering") == 1


def test_a_timer_of_the_loop_renews_and_rests_when_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "IDLE", 0.02)

    async def whole() -> None:
        renewed, rested = asyncio.Event(), asyncio.Event()

        class Resting(AsyncMemoryBackend):
            async def rest(self, unused_for: float = 0.0) -> None:
                if not unused_for:
                    rested.set()

        leases = AsyncLeases(
            Resting(), observers=[lambda event: event.name == "lease.renewed" and renewed.set()]
        )
        async with asyncio.timeout(SOON):
            async with leases.acquire("a", ttl=0.6) as lease:
                await renewed.wait()
                assert lease.held
            await rested.wait()
            assert leases._renewer._timer is None
            renewed.clear()
            async with leases.acquire("a", ttl=0.6):
                await renewed.wait()
            await leases.aclose()

    asyncio.run(whole())


def test_closing_ends_a_turn_that_is_under_way() -> None:
    async def whole() -> None:
        asked = asyncio.Event()

        class Deaf(AsyncMemoryBackend):
            async def ask_many(
                self, commands: Sequence[Command], timeout: float
            ) -> Sequence[Reply | FencingError]:
                asked.set()
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

        leases = AsyncLeases(Deaf(), observers=[])
        async with asyncio.timeout(SOON):
            await leases.acquire("a", ttl=0.3)
            await asked.wait()
            await leases.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert leases._renewer._timer is None

    asyncio.run(whole())


# The tests above can fail


def one_failure_more(self: Tenure, renewal: Renewal) -> bool:
    self.failures += 1
    return self.failures > renewal.failures


def never_resets(self: Tenure, sent_at: float, ttl: float | None = None) -> bool:
    self.since = max(self.since, sent_at)
    return True


def loses_as_expired(self: Tenure, name: str, reason: str, lose: Any = Tenure.lose) -> bool:
    return bool(lose(self, name, "expired"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "instead", "test"),
    [
        (
            "failed",
            one_failure_more,
            lambda twin: test_three_failures_in_a_row_abandon_the_lease_before_its_deadline(
                twin, how="fail_next"
            ),
        ),
        ("renewed", never_resets, test_failures_with_a_success_between_them_never_abandon),
        ("lose", loses_as_expired, test_a_superseded_lease_is_lost_at_its_next_renewal),
        (
            "next_at",
            lambda self, renewal: (self.since + self.ttl / 2, True),
            test_a_lease_is_renewed_at_each_third_of_its_ttl,
        ),
    ],
)
def test_a_broken_tenure_is_convicted(
    kind: type[Threads] | type[Tasks],
    name: str,
    instead: Callable[..., Any],
    test: Callable[[AnyTwin], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tenure, name, instead)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(kind())
    monkeypatch.undo()
    test(kind())


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_that_does_not_look_at_the_clock_is_convicted(
    kind: type[Threads] | type[Tasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tenure, "over", lambda self, now: False)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_expiry_during_a_pause_is_noticed_without_asking_anybody(kind())
