"""The gate in front of the backend: one of a process asks, the others queue in memory."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fencing import (
    AsyncLease,
    AsyncLeases,
    BackendUnavailable,
    ConfigurationError,
    LeaseNotHeld,
    Leases,
    LeaseUnavailable,
)
from fencing.backends.base import Acquire
from fencing.gate import Gate, Seat
from fencing.testing import AsyncMemoryBackend, FakeClock, MemoryBackend
from fencing.token import HeldBy

SOON = 30.0  # seconds after which a test that waits for another thread gives up


class Line:
    """Seats at one gate for one resource, and who was woken, in order."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.woken: list[str] = []

    def seat(self, owner: str) -> Seat:
        return Seat(owner)

    def enter(self, seat: Seat, resource: str = "a") -> bool:
        return self.gate.enter(resource, seat, queue=lambda: lambda: self.woken.append(str(seat.owner)))


def test_the_first_is_inside_and_the_others_wait_in_the_order_they_came() -> None:
    line = Line()
    seats = [line.seat(owner) for owner in "wxyz"]
    assert [line.enter(seat) for seat in seats] == [True, False, False, False]
    assert line.gate.waiting("a") == 3
    for seat in seats:
        line.gate.leave("a", seat)
    assert line.woken == ["x", "y", "z"]
    assert line.gate.waiting("a") == 0
    assert line.enter(line.seat("v"))


def test_the_one_who_is_woken_is_inside_already() -> None:
    """Nobody who comes between the wake-up call and the waking can slip in."""
    line = Line()
    first, second = line.seat("w"), line.seat("x")
    line.enter(first)
    line.enter(second)
    line.gate.leave("a", first)
    assert not line.enter(line.seat("y"))
    line.gate.leave("a", second)
    assert line.woken == ["x", "y"]


def test_resources_have_their_own_lines() -> None:
    line = Line()
    assert line.enter(line.seat("w"), "a")
    assert line.enter(line.seat("x"), "b")
    assert (line.gate.waiting("a"), line.gate.waiting("b")) == (0, 0)


def test_who_does_not_queue_is_turned_away_and_leaves_no_trace() -> None:
    line = Line()
    first = line.seat("w")
    line.enter(first)
    assert not line.gate.enter("a", line.seat("x"))
    assert line.gate.waiting("a") == 0
    line.gate.leave("a", first)
    assert line.woken == []


def test_who_withdraws_is_passed_over() -> None:
    line = Line()
    first, second, third = (line.seat(owner) for owner in "wxy")
    for seat in (first, second, third):
        line.enter(seat)
    line.gate.withdraw("a", second)
    line.gate.leave("a", first)
    assert line.woken == ["y"]


def test_who_withdraws_after_being_let_in_lets_the_next_one_in() -> None:
    """A wait that runs out in the same moment as it is its turn must not take the place with it."""
    line = Line()
    first, second, third = (line.seat(owner) for owner in "wxy")
    for seat in (first, second, third):
        line.enter(seat)
    line.gate.leave("a", first)
    line.gate.withdraw("a", second)
    assert line.woken == ["x", "y"]


def test_leaving_twice_is_harmless() -> None:
    line = Line()
    first, second, third = (line.seat(owner) for owner in "wxy")
    for seat in (first, second, third):
        line.enter(seat)
    line.gate.leave("a", first)
    line.gate.leave("a", first)
    line.gate.withdraw("a", first)
    assert line.woken == ["x"]
    assert line.gate.waiting("a") == 1


def test_leaving_without_having_been_inside_is_harmless() -> None:
    line = Line()
    first = line.seat("w")
    line.enter(first)
    line.gate.leave("a", line.seat("x"))
    line.gate.leave("b", first)
    assert not line.enter(line.seat("y"))


def test_an_owner_that_is_inside_and_comes_again_is_told_so() -> None:
    line = Line()
    line.enter(line.seat("w"))
    with pytest.raises(ConfigurationError, match="re-entrant"):
        line.enter(line.seat("w"))
    assert line.gate.waiting("a") == 0


def test_an_owner_may_come_again_after_leaving() -> None:
    line = Line()
    first = line.seat("w")
    line.enter(first)
    line.gate.leave("a", first)
    assert line.enter(line.seat("w"))


def test_a_gate_remembers_nothing_of_those_who_left() -> None:
    line = Line()
    for number in range(1000):
        seats = [line.seat(f"{number} {owner}") for owner in "wx"]
        for seat in seats:
            line.enter(seat, f"resource {number}")
        for seat in seats:
            line.gate.leave(f"resource {number}", seat)
    assert (line.gate._inside, line.gate._queues) == ({}, {})


def test_a_gate_says_what_it_knows_of_the_lease_inside() -> None:
    held_by = HeldBy("a", "f" * 32, 7, "me", 0.0, 5.0)

    class Held:
        held = True

        def _as_held_by(self, resource: str) -> HeldBy:
            return held_by._replace(resource=resource)

    line = Line()
    assert line.gate.held_by("a") is None
    seat = line.seat("w")
    line.enter(seat)
    assert line.gate.held_by("a") is None
    seat.lease = Held()
    assert line.gate.held_by("a") == held_by


def test_many_threads_at_one_gate_are_inside_one_at_a_time() -> None:
    gate, inside, most, entered = Gate(), 0, 0, 0

    def work(number: int) -> None:
        nonlocal inside, most, entered
        for turn in range(50):
            seat, woken = Seat((number, turn)), threading.Event()
            if not gate.enter("a", seat, queue=lambda woken=woken: woken.set):
                assert woken.wait(SOON)
            inside += 1
            most = max(most, inside)
            entered += 1
            inside -= 1
            gate.leave("a", seat)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert (most, entered) == (1, 400)


# Leases at the gate


class Watched(Gate):
    """A gate that says when somebody queues."""

    def __init__(self) -> None:
        super().__init__()
        self.queued = threading.Semaphore(0)

    def enter(
        self, resource: str, seat: Seat, *, queue: Callable[[], Callable[[], None]] | None = None
    ) -> bool:
        inside = super().enter(resource, seat, queue=queue)
        if not inside and queue is not None:  # a first look, without a queue, comes before
            self.queued.release()
        return inside


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(FakeClock())


@pytest.fixture
def leases(backend: MemoryBackend) -> Leases:
    leases = Leases(backend, observers=[])
    leases.gate = Watched()
    return leases


def acquires(backend: MemoryBackend) -> int:
    return sum(isinstance(command, Acquire) for command in backend.asked)


def test_a_thread_that_asks_again_for_what_it_holds_fails_at_once(leases: Leases) -> None:
    with leases.acquire("a") as lease:
        with pytest.raises(ConfigurationError, match="re-entrant"):
            leases.acquire("a", wait=SOON)
        with pytest.raises(ConfigurationError, match="re-entrant"):
            leases.try_acquire("a")
        with pytest.raises(ConfigurationError, match="re-entrant"):
            leases.acquire_all(["b", "a"])
        assert lease.held
        assert acquires(leases.backend) == 1  # type: ignore[arg-type]
    assert leases.try_acquire("a")
    assert leases.try_acquire("b")


def test_a_thread_that_asks_again_fails_at_once_however_much_it_held_meanwhile(leases: Leases) -> None:
    with leases.acquire("a"):
        for number in range(40):
            leases.acquire(f"b {number}").release()
        with pytest.raises(ConfigurationError, match="re-entrant"):
            leases.acquire("a", wait=SOON)


def test_the_check_of_reentrancy_can_fail(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were everybody a stranger to himself, the thread would wait for itself until its budget is over."""
    monkeypatch.setattr(Seat, "waits_for_itself", lambda self, inside: False)
    with leases.acquire("a"), pytest.raises(LeaseUnavailable):
        leases.acquire("a", wait=0.001)


def test_a_second_thread_waits_in_memory_and_gets_the_lease_when_the_first_is_done(
    leases: Leases, backend: MemoryBackend
) -> None:
    first = leases.acquire("a")
    got: list[int] = []

    def second() -> None:
        with leases.acquire("a", wait=SOON) as lease:
            got.append(lease.token)

    thread = threading.Thread(target=second)
    thread.start()
    assert leases.gate.queued.acquire(timeout=SOON)  # type: ignore[attr-defined]
    assert (acquires(backend), leases.gate.waiting("a")) == (1, 1)
    first.release()
    thread.join(SOON)
    assert got == [first.token + 1]
    assert acquires(backend) == 2


def test_threads_get_the_lease_in_the_order_they_came(leases: Leases, backend: MemoryBackend) -> None:
    first = leases.acquire("a")
    order: list[int] = []

    def wait_for_it(number: int) -> None:
        with leases.acquire("a", wait=SOON):
            order.append(number)

    threads = [threading.Thread(target=wait_for_it, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
        assert leases.gate.queued.acquire(timeout=SOON)  # type: ignore[attr-defined]
    first.release()
    for thread in threads:
        thread.join(SOON)
    assert order == [0, 1, 2, 3, 4]
    assert acquires(backend) == 6


def test_a_thread_without_a_budget_is_turned_away_without_asking_the_backend(
    leases: Leases, backend: MemoryBackend
) -> None:
    held = leases.acquire("a", label="the first")

    def second() -> object:
        with pytest.raises(LeaseUnavailable) as caught:
            leases.acquire("a", wait=0)
        return caught.value.held_by

    with ThreadPoolExecutor(1) as pool:
        held_by = pool.submit(second).result(SOON)
    assert held_by == leases.peek("a")
    assert held_by.holder == held.holder  # type: ignore[attr-defined]
    assert acquires(backend) == 1


def test_a_thread_whose_wait_runs_out_leaves_the_line(leases: Leases) -> None:
    held = leases.acquire("a")
    with ThreadPoolExecutor(1) as pool:
        failure = pool.submit(leases.acquire, "a", wait=0.001).exception(SOON)
    assert isinstance(failure, LeaseUnavailable)
    assert leases.gate.waiting("a") == 0
    held.release()
    assert leases.try_acquire("a")


def test_a_lost_lease_lets_the_next_thread_in(leases: Leases, backend: MemoryBackend) -> None:
    held = leases.acquire("a", ttl=9)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.acquire, "a", wait=SOON)
        assert leases.gate.queued.acquire(timeout=SOON)  # type: ignore[attr-defined]
        backend.expire("default", "a")
        with pytest.raises(LeaseNotHeld):
            held.renew()
        assert waiting.result(SOON).token > held.token


def test_a_failed_acquire_lets_the_next_one_in(leases: Leases, backend: MemoryBackend) -> None:
    backend.fail_next(3)
    with pytest.raises(BackendUnavailable):
        leases.acquire("a")
    assert leases.try_acquire("a")


def test_a_thread_that_waits_for_several_resources_keeps_none_that_sorts_later(leases: Leases) -> None:
    """All go in one order, whatever the order of the call, so two cannot wait for each other."""
    held = leases.acquire("a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.acquire_all, ["c", "a", "b"], wait=SOON)
        assert leases.gate.queued.acquire(timeout=SOON)  # type: ignore[attr-defined]
        for other in ("b", "c"):
            leases.acquire(other, wait=0).release()
        held.release()
        assert waiting.result(SOON).resources == ("c", "a", "b")


def test_any_thread_may_release_what_another_one_acquired(leases: Leases) -> None:
    held = leases.acquire("a")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.release).result(SOON)
    assert leases.try_acquire("a")


def test_another_context_on_the_same_thread_is_another_owner(leases: Leases) -> None:
    """Frameworks run the beginning of one request and of another on the same pool thread."""
    contexts = [contextvars.Context(), contextvars.Context()]
    held = contexts[0].run(leases.acquire, "a")
    with pytest.raises(LeaseUnavailable):
        contexts[1].run(leases.acquire, "a", wait=0)
    with pytest.raises(ConfigurationError, match="re-entrant"):
        contexts[0].run(leases.acquire, "a", wait=0)
    held.release()


def test_a_copied_context_on_the_same_thread_is_another_owner(leases: Leases) -> None:
    """As `asyncio.to_thread` and the thread pools of web frameworks copy it."""

    def two_requests() -> None:
        contextvars.copy_context().run(leases.acquire, "a")
        with pytest.raises(LeaseUnavailable):
            contextvars.copy_context().run(leases.acquire, "a", wait=0)

    contextvars.Context().run(two_requests)


def test_a_copied_context_is_another_owner_also_when_leases_were_used_before_the_copy(leases: Leases) -> None:
    def two_requests() -> None:
        leases.acquire("at startup").release()
        contextvars.copy_context().run(leases.acquire, "a")
        with pytest.raises(LeaseUnavailable):
            contextvars.copy_context().run(leases.acquire, "a", wait=0)

    contextvars.Context().run(two_requests)


def test_who_holds_it_and_asks_again_in_a_copied_context_is_the_same_owner(leases: Leases) -> None:
    def nested() -> None:
        with leases.acquire("a"), pytest.raises(ConfigurationError, match="re-entrant"):
            contextvars.copy_context().run(leases.acquire, "a", wait=SOON)

    contextvars.Context().run(nested)


def test_waiting_at_the_gate_counts_towards_the_budget(leases: Leases, backend: MemoryBackend) -> None:
    clock = backend.clock
    stranger = Leases(backend, observers=[])
    started = clock.now()
    held = leases.acquire("a", ttl=300)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.acquire, "a", wait=SOON)
        assert leases.gate.queued.acquire(timeout=SOON)  # type: ignore[attr-defined]
        clock.pause(0.9 * SOON)  # type: ignore[attr-defined]
        backend.forget()
        stranger.acquire("a", ttl=300)
        with pytest.raises(LeaseNotHeld):
            held.release()
        assert isinstance(waiting.exception(SOON), LeaseUnavailable)
    assert clock.now() - started <= SOON + 1


# The same for tasks


@pytest.fixture
def async_leases(backend: MemoryBackend) -> AsyncLeases:
    return AsyncLeases(AsyncMemoryBackend(sync=backend), observers=[])


async def take(leases: AsyncLeases, resource: str, *, wait: float) -> AsyncLease:
    return await leases.acquire(resource, wait=wait)


async def settled(turns: int = 10) -> None:
    """Let every task that can go on do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


def test_a_task_that_asks_again_for_what_it_holds_fails_at_once(async_leases: AsyncLeases) -> None:
    async def story() -> None:
        async with async_leases.acquire("a") as lease:
            with pytest.raises(ConfigurationError, match="re-entrant"):
                await async_leases.acquire("a", wait=SOON)
            with pytest.raises(ConfigurationError, match="re-entrant"):
                await async_leases.acquire_all(["b", "a"])
            assert lease.held
        assert await async_leases.try_acquire("a")
        assert await async_leases.try_acquire("b")

    asyncio.run(story())


def test_a_second_task_waits_in_memory_and_gets_the_lease_when_the_first_is_done(
    async_leases: AsyncLeases, backend: MemoryBackend
) -> None:
    async def story() -> None:
        first = await async_leases.acquire("a")
        second = asyncio.create_task(take(async_leases, "a", wait=SOON))
        await settled()
        assert not second.done()
        assert (acquires(backend), async_leases.gate.waiting("a")) == (1, 1)
        await first.release()
        assert (await second).token == first.token + 1
        assert acquires(backend) == 2

    asyncio.run(story())


def test_tasks_get_the_lease_in_the_order_they_came(
    async_leases: AsyncLeases, backend: MemoryBackend
) -> None:
    order: list[int] = []

    async def wait_for_it(number: int) -> None:
        async with async_leases.acquire("a", wait=SOON):
            order.append(number)
            await settled(2)

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(wait_for_it(number))

    asyncio.run(story())
    assert order == [0, 1, 2, 3, 4]
    assert acquires(backend) == 5


def test_a_cancelled_task_leaves_the_line(async_leases: AsyncLeases) -> None:
    async def story() -> None:
        first = await async_leases.acquire("a")
        tasks = [asyncio.create_task(take(async_leases, "a", wait=SOON)) for _ in range(3)]
        await settled()
        tasks[1].cancel()
        await settled()
        assert async_leases.gate.waiting("a") == 2
        await first.release()
        tasks[0].cancel()  # in the very moment in which it was let in
        await settled()
        assert [task.done() for task in tasks] == [True, True, True]
        assert tasks[2].exception() is None
        assert async_leases.gate.waiting("a") == 0

    asyncio.run(story())


def test_a_task_whose_wait_runs_out_leaves_the_line(async_leases: AsyncLeases) -> None:
    async def story() -> None:
        first = await async_leases.acquire("a")
        with pytest.raises(LeaseUnavailable):
            await asyncio.create_task(take(async_leases, "a", wait=0.001))
        assert async_leases.gate.waiting("a") == 0
        await first.release()
        assert await async_leases.try_acquire("a")

    asyncio.run(story())


def test_waiting_at_the_gate_counts_towards_the_budget_of_a_task(
    async_leases: AsyncLeases, backend: MemoryBackend
) -> None:
    async def story() -> None:
        clock = backend.clock
        stranger = AsyncLeases(async_leases.backend, observers=[])
        started = clock.now()
        held = await async_leases.acquire("a", ttl=300)
        waiting = asyncio.create_task(take(async_leases, "a", wait=SOON))
        await settled()
        clock.pause(0.9 * SOON)  # type: ignore[attr-defined]
        backend.forget()
        await stranger.acquire("a", ttl=300)
        with pytest.raises(LeaseNotHeld):
            await held.release()
        with pytest.raises(LeaseUnavailable):
            await waiting
        assert clock.now() - started <= SOON + 1

    asyncio.run(story())


def test_a_task_without_a_budget_is_turned_away_without_asking_the_backend(
    async_leases: AsyncLeases, backend: MemoryBackend
) -> None:
    async def story() -> None:
        await async_leases.acquire("a")
        assert await asyncio.create_task(async_leases.try_acquire("a")) is None
        assert acquires(backend) == 1

    asyncio.run(story())


def test_several_resources_are_entered_together_and_left_together(async_leases: AsyncLeases) -> None:
    """In one order whatever the order of the call, so two of them cannot wait for each other."""
    done: list[str] = []

    async def work(name: str, *resources: str) -> None:
        async with async_leases.acquire_all(resources, wait=SOON):
            await settled(3)
            done.append(name)

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(work("ab", "a", "b"))
            group.create_task(work("ba", "b", "a"))
            group.create_task(work("cab", "c", "a", "b"))

    asyncio.run(story())
    assert done == ["ab", "ba", "cab"]
    assert (async_leases.gate._inside, async_leases.gate._queues) == ({}, {})


def test_who_is_turned_away_is_told_of_the_resource_it_asked_for(async_leases: AsyncLeases) -> None:
    async def story() -> None:
        await async_leases.acquire_all(["a", "b"])
        with pytest.raises(LeaseUnavailable) as caught:
            await asyncio.create_task(take(async_leases, "b", wait=0.0))
        assert caught.value.held_by is not None
        assert caught.value.held_by.resource == "b"

    asyncio.run(story())
