"""What goes over the line: one request for each step of a lease, and one connection for each thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio
from contract.subjects import BackgroundLoop, InRedis, Subject, race
from harness.proxy import Proxy
from harness.sides import Side

from fencing.backends.base import Acquire, Done, Granted, Peek, Release, Renew
from fencing.backends.redis import AsyncRedisBackend, RedisBackend

MakeSide = Callable[..., Side]
MakeSubject = Callable[..., Subject]


@pytest.fixture
def side(make_side: MakeSide, line: Proxy, line_url: str) -> Side:
    """`Leases` or `AsyncLeases` that have warmed up: connected, joined, all scripts known to the server."""
    side = make_side(line_url)
    lease = side.acquire("warm-up")
    side.renew(lease)
    side.release(lease)
    side.peek("warm-up")
    line.clear()
    return side


@pytest.fixture
def warm(make_subject: MakeSubject, line: Proxy, line_url: str) -> Subject:
    """A backend that has warmed up."""
    subject = make_subject(line_url)
    taken = subject.take("warm-up")
    subject.renew("warm-up", holder=taken.holder)
    subject.remint("warm-up", holder=taken.holder, floor=0)
    subject.release("warm-up", holder=taken.holder)
    subject.peek("warm-up")
    line.clear()
    return subject


def test_a_cycle_of_acquire_and_release_is_two_requests(side: Side, line: Proxy) -> None:
    side.release(side.acquire("invoice:42"))

    assert line.commands == [b"EVALSHA"] * 2


def test_a_with_block_is_two_requests(side: Side, line: Proxy) -> None:
    side.leave(side.acquire("invoice:42"))

    assert line.commands == [b"EVALSHA"] * 2


def test_a_renewal_is_one_request(side: Side, line: Proxy) -> None:
    lease = side.acquire("invoice:42")
    line.clear()
    side.renew(lease)

    assert line.commands == [b"EVALSHA"]


def test_a_look_is_one_request(side: Side, line: Proxy) -> None:
    side.peek("invoice:42")

    assert line.commands == [b"EVALSHA"]


def test_a_refusal_is_one_request(side: Side, make_side: MakeSide, line: Proxy, line_url: str) -> None:
    other = make_side(line_url)
    other.acquire("invoice:42")
    line.clear()

    assert side.try_acquire("invoice:42") is None
    assert line.commands == [b"EVALSHA"]


def test_a_resource_that_this_process_holds_is_refused_without_a_request(side: Side, line: Proxy) -> None:
    side.acquire("invoice:42")
    line.clear()

    with ThreadPoolExecutor(1) as another_thread:
        assert another_thread.submit(side.try_acquire, "invoice:42").result(10) is None
    assert line.commands == []


def test_fifty_cycles_use_one_connection(side: Side, line: Proxy) -> None:
    for number in range(50):
        side.release(side.acquire(f"invoice:{number}"))

    assert line.connections == 0, "none beside the one of the warm-up"
    assert line.commands == [b"EVALSHA"] * 100


def test_one_thread_never_needs_a_second_connection(
    make_subject: MakeSubject, line: Proxy, line_url: str
) -> None:
    subject = make_subject(line_url)
    for number in range(10):
        taken = subject.take(f"invoice:{number}")
        subject.acquire(f"invoice:{number}")
        subject.renew(f"invoice:{number}", holder=taken.holder)
        subject.remint(f"invoice:{number}", holder=taken.holder, floor=taken.token)
        subject.ask_many([Renew(taken.target, taken.holder, 60_000), Peek(taken.target)])
        subject.release(f"invoice:{number}", holder=taken.holder)

    assert line.connections == 1


def test_two_threads_never_need_a_third_connection(
    sync_subject: MakeSubject, line: Proxy, line_url: str
) -> None:
    subject = sync_subject(line_url)

    def cycle(name: str):
        def run(number: int):
            taken = subject.take(f"{name}:{number}")
            return subject.release(f"{name}:{number}", holder=taken.holder)

        return run

    assert set(race(cycle("invoice"), cycle("order"), rounds=20)) == {(Done(), Done())}
    assert line.connections <= 2


def test_a_connection_greets_the_server_once(make_subject: MakeSubject, line: Proxy, line_url: str) -> None:
    subject = make_subject(line_url, protocol=3, client_name="worker")
    for number in range(5):
        subject.take(f"invoice:{number}")

    assert line.commands.count(b"HELLO") == 1
    assert line.commands.count(b"PING") == 0, "no health checks beside our own"


def test_a_rested_backend_connects_again(make_subject: MakeSubject, line: Proxy, line_url: str) -> None:
    subject = make_subject(line_url)
    subject.take("invoice:42")
    subject._finish(subject.backend.rest())
    subject.take("invoice:43")

    assert line.connections == 2


def test_the_first_use_joins_the_namespace_and_sends_each_script_once(
    make_subject: MakeSubject, line: Proxy, line_url: str
) -> None:
    subject = make_subject(line_url)
    subject.take("invoice:42")
    subject.take("invoice:43")
    scripts = [command for command in line.commands if command.startswith(b"EVAL")]

    joined, acquired, acquired_again = [b"EVALSHA", b"EVAL"], [b"EVALSHA", b"EVAL"], [b"EVALSHA"]
    assert scripts == joined + acquired + acquired_again


def test_the_first_use_of_another_process_finds_the_scripts_there(
    make_subject: MakeSubject, warm: Subject, line: Proxy, line_url: str
) -> None:
    make_subject(line_url).take("invoice:42")

    joined_and_acquired = [b"EVALSHA"] * 2
    assert [command for command in line.commands if command.startswith(b"EVAL")] == joined_and_acquired


def test_each_namespace_is_joined_once(warm: Subject, line: Proxy) -> None:
    elsewhere = warm.target("invoice:42", namespace=f"{warm.namespace}.b")
    for _ in range(3):
        warm.ask(Peek(elsewhere))

    assert line.commands == [b"EVALSHA"] * 4


def test_a_script_that_the_server_forgot_is_sent_once(warm: Subject, line: Proxy, admin: redis.Redis) -> None:
    admin.script_flush()
    taken = warm.take("invoice:42")
    assert line.commands == [b"EVALSHA", b"EVAL"]

    line.clear()
    warm.take("invoice:43")
    assert line.commands == [b"EVALSHA"]

    line.clear()
    warm.release("invoice:42", holder=taken.holder)
    assert line.commands == [b"EVALSHA", b"EVAL"]

    line.clear()
    warm.release("invoice:43", holder=taken.holder)
    assert line.commands == [b"EVALSHA"]


def test_a_cycle_survives_a_server_that_forgot_its_scripts(
    side: Side, line: Proxy, admin: redis.Redis
) -> None:
    admin.script_flush()
    side.release(side.acquire("invoice:42"))
    assert line.commands == [b"EVALSHA", b"EVAL"] * 2

    line.clear()
    side.release(side.acquire("invoice:42"))
    assert line.commands == [b"EVALSHA"] * 2


def test_a_batch_sends_a_script_that_the_server_forgot_once(
    warm: Subject, line: Proxy, admin: redis.Redis
) -> None:
    leases = [warm.take(f"invoice:{number}") for number in range(20)]
    admin.script_flush()
    line.clear()
    replies = warm.ask_many([Renew(taken.target, taken.holder, 60_000) for taken in leases])

    assert list(replies) == [Done()] * 20
    assert line.commands == [b"EVALSHA"] * 20 + [b"EVAL"] + [b"EVALSHA"] * 19


def test_a_batch_sends_each_script_that_the_server_forgot_once(
    warm: Subject, line: Proxy, admin: redis.Redis
) -> None:
    leases = [warm.take(f"invoice:{number}") for number in range(3)]
    admin.script_flush()
    line.clear()
    renewals = [Renew(taken.target, taken.holder, 60_000) for taken in leases]
    releases = [Release(taken.target, taken.holder) for taken in leases]
    replies = warm.ask_many(renewals + releases)

    assert list(replies) == [Done()] * 6
    assert line.commands.count(b"EVAL") == 2
    assert line.requests == 12


def test_a_batch_of_renewals_is_as_many_requests(warm: Subject, line: Proxy) -> None:
    leases = [warm.take(f"invoice:{number}") for number in range(20)]
    line.clear()
    warm.ask_many([Renew(taken.target, taken.holder, 60_000) for taken in leases])

    assert line.commands == [b"EVALSHA"] * 20
    assert line.connections == 0


def test_an_empty_batch_sends_nothing_and_waits_for_nothing(warm: Subject, line: Proxy) -> None:
    before = warm.now()
    warm.ask_many([], timeout=0.3)

    assert line.requests == 0
    assert warm.now() - before < 0.3


def test_a_pool_that_is_used_up_is_no_hindrance(admin: redis.Redis, line_url: str, namespace: str) -> None:
    with redis.Redis.from_url(line_url, max_connections=1) as client:
        only_one = client.connection_pool.get_connection()
        backend = RedisBackend(client)
        subject = Subject(backend, InRedis(admin, namespace), namespace)

        assert isinstance(subject.acquire("invoice:42"), Granted)
        backend.close()
        client.connection_pool.release(only_one)
        assert client.ping()


def test_an_asynchronous_pool_that_is_used_up_is_no_hindrance(
    admin: redis.Redis, line_url: str, namespace: str, background_loop: BackgroundLoop
) -> None:
    async def scenario() -> None:
        async with redis.asyncio.Redis.from_url(line_url, max_connections=1) as client:
            only_one = await client.connection_pool.get_connection()
            backend = AsyncRedisBackend(client)
            acquire = Acquire(backend.target(namespace, ("invoice:42",)), "0" * 32, "", 60_000)
            assert isinstance(await backend.ask(acquire, 2.0), Granted)
            await backend.close()
            await client.connection_pool.release(only_one)
            assert await client.ping()

    background_loop.finish(scenario())


def test_the_pool_of_the_client_is_left_alone(line: Proxy, line_url: str, namespace: str) -> None:
    with redis.Redis.from_url(line_url) as client:
        settings = dict(client.connection_pool.connection_kwargs)
        backend = RedisBackend(client)
        backend.ask(Peek(backend.target(namespace, ("invoice:42",))), 2.0)
        backend.close()

        assert client.connection_pool.connection_kwargs == settings
        line.clear()
        client.ping()
        assert line.connections == 1, "the client has a connection of its own"
