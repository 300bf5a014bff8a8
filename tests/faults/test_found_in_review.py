"""What a hostile review broke, each as a test that would have told."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
import traceback
from typing import Any

import pytest
import redis
import redis.asyncio
from faults.conftest import MakeSide, wait_until
from faults.test_renewal_failures import address
from harness.sides import Recorder

from fencing import AsyncLeases, ConfigurationError, FencingError, LeaseLost, Leases, LeaseUnavailable
from fencing.backends.base import Command, Renew, Reply
from fencing.backends.memory import AsyncMemoryBackend, MemoryBackend
from fencing.events import Acquired, Event, GivenBack, Lost, NotHeld, Renewed


def test_overlapping_renewals_by_hand_do_not_lose_a_healthy_lease(redis_client, namespace: str) -> None:
    with Leases(redis_client, namespace=namespace) as leases:
        lease = leases.acquire("job:1", ttl=0.5)
        until = time.monotonic() + 1.2

        def work() -> None:
            while time.monotonic() < until:
                lease.renew()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lease.check()
        lease.release()


class Held(MemoryBackend):
    """Holds a batch of renewals back until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def ask_many(self, commands: Any, timeout: float) -> Any:
        self.under_way.set()
        assert self.go_on.wait(10)
        return super().ask_many(commands, timeout)


def test_lease_whose_release_did_not_arrive_is_not_renewed_by_what_was_under_way() -> None:
    backend = Held()
    leases = Leases(backend, observers=[])
    with leases.acquire("job:1", ttl=0.4) as lease:
        assert backend.under_way.wait(10)
        backend.fail_next(3)
    backend.go_on.set()
    wait_until(lambda: leases.peek("job:1") is None)
    assert lease.lost is not None


def test_leases_of_a_second_event_loop_are_renewed(redis_url: str, namespace: str) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    recorder = Recorder()
    leases = AsyncLeases(client, namespace=namespace, observers=[recorder.observe])

    async def hold(renewals: int) -> None:
        async with leases.acquire("job:1", ttl=0.3):
            while len(recorder.of(Renewed)) < renewals:
                await asyncio.sleep(0.01)
        await leases.backend.rest()
        await client.aclose()

    asyncio.run(hold(0))
    asyncio.run(asyncio.wait_for(hold(3), 10))


def test_thread_that_cannot_be_started_once_does_not_end_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, iter([True])

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "fencing-renewer" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    recorder = Recorder()
    leases = Leases(MemoryBackend(), observers=[recorder.observe])
    with pytest.raises(RuntimeError):
        leases.acquire("job:1", ttl=0.3)
    assert leases.peek("job:1") is None, "given back"
    with leases.acquire("job:1", ttl=0.3):
        recorder.wait_for(Renewed, 3)


def test_interrupt_while_observers_are_told_gives_the_lease_back() -> None:
    def interrupt(event: Event) -> None:
        if type(event) is Acquired:
            raise KeyboardInterrupt

    leases = Leases(MemoryBackend(), observers=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        leases.acquire("job:1", ttl=30)
    assert leases.peek("job:1") is None
    assert leases.gate.held_by("job:1") is None
    wait_until(lambda: leases._renewer.leases() == [])


def test_request_is_bounded_although_signals_keep_arriving(private_redis, namespace: str) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        leases = Leases(client, namespace=namespace, observers=[])
        lease = leases.acquire("job:1", ttl=30)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        private_redis.pause()
        began = time.monotonic()
        try:
            with pytest.raises(FencingError):
                lease.release()
            assert time.monotonic() - began < 4
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            private_redis.resume()


def test_fault_of_a_backend_does_not_mask_the_error_of_the_block() -> None:
    class Faulty(MemoryBackend):
        faulty = False

        def ask(self, command: Command, timeout: float) -> Reply:
            if self.faulty:
                raise RuntimeError("no fencing error at all")
            return super().ask(command, timeout)

    backend = Faulty()
    with pytest.raises(LookupError), Leases(backend, observers=[]).acquire("job:1"):
        backend.faulty = True
        raise LookupError


def test_loss_noticed_by_another_thread_wakes_a_waiting_task_in_debug_mode() -> None:
    async def scenario() -> None:
        leases = AsyncLeases(AsyncMemoryBackend(), observers=[])
        lease = await leases.acquire("job:1", ttl=0.2, hold_to_ttl=True)

        async def wait() -> Any:
            return await leases.acquire("job:1", wait=5)

        waiting = asyncio.create_task(wait())

        def look() -> None:
            while lease.held:
                pass

        await asyncio.to_thread(look)
        async with asyncio.timeout(3):
            await (await waiting).release()

    asyncio.run(scenario(), debug=True)


def test_renewal_that_finds_the_lease_released_does_not_make_it_look_lost() -> None:
    class Overtaken(MemoryBackend):
        meanwhile: Any = None

        def ask(self, command: Command, timeout: float) -> Reply:
            if isinstance(command, Renew) and self.meanwhile is not None:
                self.meanwhile()
            return super().ask(command, timeout)

    recorder, backend = Recorder(), Overtaken()
    lease = Leases(backend, observers=[recorder.observe]).acquire("job:1")
    backend.meanwhile = lease.release
    with pytest.raises(FencingError):
        lease.renew()
    assert lease.lost is None
    assert recorder.of(Lost) == recorder.of(NotHeld) == []


def test_note_of_a_later_version_does_not_keep_a_lease_from_being_granted(
    make_side: MakeSide, redis_url: str, redis_client, namespace: str
) -> None:
    redis_client.set(f"fencing:1:{{{namespace}/0}}:note:job:1", "2 a later layout", px=60_000)
    side = make_side(redis_url)
    side.release(side.acquire("job:1"))


def test_waiter_at_the_gate_gets_no_lease_after_close() -> None:
    leases = Leases(MemoryBackend(), observers=[])
    leases.acquire("job:1")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            leases.acquire("job:1", wait=10)
        except ConfigurationError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: leases.gate.waiting("job:1") == 1)
    leases.close()
    thread.join(5)
    assert len(ended) == 1


def test_one_acquisition_is_not_used_twice() -> None:
    async def scenario() -> None:
        once = AsyncLeases(AsyncMemoryBackend(), observers=[]).acquire("job:1")
        async with once:
            pass
        with pytest.raises(ConfigurationError, match="acquire again"):
            async with once:
                pass

    asyncio.run(scenario())


def test_sticky_error_does_not_grow() -> None:
    lease = Leases(MemoryBackend(), observers=[]).acquire("job:1", ttl=0.05, hold_to_ttl=True)
    wait_until(lambda: not lease.held)
    sizes = []
    for _ in range(50):
        with pytest.raises(LeaseLost) as lost:
            lease.check()
        sizes.append(len(traceback.extract_tb(lost.value.__traceback__)))
    assert all(before == after for before, after in itertools.pairwise(sizes))


def test_observer_that_keeps_a_list_of_events_receives_them() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def __call__(self, event: Event) -> None:
            self.events.append(event)

    keeps = Keeps()
    Leases(MemoryBackend(), observers=[keeps]).acquire("job:1").release()
    assert [event.name for event in keeps.events] == ["lease.acquired", "lease.released"]


def test_lease_without_a_ttl_does_not_make_waiters_ask_without_pause(
    make_side: MakeSide, redis_url: str, redis_client, namespace: str, proxy
) -> None:
    line = proxy(*address(redis_url))
    holder, waiter = make_side(redis_url), make_side(f"redis://127.0.0.1:{line.port}/0")
    holder.acquire("job:1", hold_to_ttl=True)
    redis_client.persist(f"fencing:1:{{{namespace}/0}}:lease:job:1")
    with pytest.raises(LeaseUnavailable):
        waiter.acquire("job:1", wait=0.3)
    assert line.commands.count(b"EVALSHA") < 40, "about every 25 ms"
    redis_client.delete(f"fencing:1:{{{namespace}/0}}:lease:job:1")


def test_asking_again_fails_at_once_also_after_an_older_lease_was_released() -> None:
    leases = Leases(MemoryBackend(), observers=[])
    older, held = leases.acquire("a"), leases.acquire("b")
    older.release()
    with leases.acquire("c"), pytest.raises(ConfigurationError, match="re-entrant"):
        leases.acquire("b", wait=0.2)
    held.release()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_lease_that_does_not_reach_its_caller_is_told_as_given_back(
    kind: str, redis_url: str, namespace: str
) -> None:
    recorder = Recorder()

    def interrupt(event: Event) -> None:
        if type(event) is Acquired:
            raise KeyboardInterrupt

    observers = [recorder.observe, interrupt]

    async def scenario() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncLeases(client, namespace=namespace, observers=observers) as leases:
                with pytest.raises(KeyboardInterrupt):
                    await leases.acquire("job:1")
                assert await leases.peek("job:1") is None

    if kind == "async":
        asyncio.run(scenario())
    else:
        with redis.Redis.from_url(redis_url) as client:
            with Leases(client, namespace=namespace, observers=observers) as leases:
                with pytest.raises(KeyboardInterrupt):
                    leases.acquire("job:1")
                assert leases.peek("job:1") is None
    assert [event.cause for event in recorder.of(GivenBack)] == ["KeyboardInterrupt"]
