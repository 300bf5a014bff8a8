"""Each way the network can fail, shown on a real Redis."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from harness.proxy import Proxy
from harness.resp import Splitter
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from sqlalchemy import make_url

SOON = 0.3  # seconds a client waits for a reply that never comes


@pytest.fixture
def line(redis_url, proxy) -> Proxy:
    url = make_url(redis_url)
    return proxy(url.host, url.port)


def connect(line: Proxy, timeout: float = SOON) -> Redis:
    retry = Retry(NoBackoff(), 0)
    client = Redis(host=line.host, port=line.port, socket_timeout=timeout, retry=retry, protocol=2)
    client.ping()  # the handshake is over, so that commands and replies can be counted
    return client


@pytest.fixture
def client(line) -> Iterator[Redis]:
    client = connect(line)
    line.clear()
    yield client
    client.close()


def test_commands_are_counted_however_they_are_packed(line, client, namespace):
    pipeline = client.pipeline(transaction=False)
    pipeline.set(namespace, b"*1\r\n$4\r\nFAKE\r\n" * 1000)
    pipeline.get(namespace)
    pipeline.eval("return {1, {2, 'three'}}", 0)
    pipeline.execute()

    assert line.commands == [b"SET", b"GET", b"EVAL"]
    assert line.requests == 3


def test_a_command_is_noticed_by_a_waiting_test(line, client):
    seen: list[bytes] = []
    waiter = threading.Thread(target=lambda: seen.extend(line.wait_for_commands(2)))
    waiter.start()
    client.ping()
    client.echo("x")
    waiter.join(5)

    assert seen == [b"PING", b"ECHO"]
    with pytest.raises(TimeoutError, match="2 of 3"):
        line.wait_for_commands(3, timeout=0.01)


def test_messages_are_recognised_when_they_arrive_byte_by_byte():
    messages = [
        b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n",
        b"+OK\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"%1\r\n+key\r\n*2\r\n:1\r\n_\r\n",
        b">2\r\n+message\r\n$0\r\n\r\n",
        b"|1\r\n+ttl\r\n:9\r\n$2\r\nok\r\n",
        b"PING inline\r\n",
    ]
    splitter = Splitter()
    found = [message for byte in b"".join(messages) for message in splitter.feed(bytes([byte]))]

    assert found == messages


def test_delay_holds_both_directions_and_keeps_the_order(line, client, namespace):
    line.delay(0.05)
    began = time.monotonic()
    client.ping()
    assert time.monotonic() - began >= 0.1

    raw = socket.create_connection((line.host, line.port), timeout=5)
    with raw:
        for number in range(20):
            line.delay(0.02 / (number + 1))  # each could overtake the one before
            raw.sendall(b"RPUSH %b %d\r\n" % (namespace.encode(), number))
            line.wait_for_commands(number + 2)
        line.heal()
        received = b""
        while received.count(b"\r\n") < 20:
            received += raw.recv(1000)
    assert client.lrange(namespace, 0, -1) == [b"%d" % number for number in range(20)]


def test_healing_delivers_at_once_what_was_delayed(line, client):
    line.delay(60)
    raw = socket.create_connection((line.host, line.port), timeout=5)
    with raw:
        raw.sendall(b"PING\r\n")
        line.wait_for_commands(1)
        line.heal()
        assert raw.recv(100) == b"+PONG\r\n"


def test_cut_resets_old_and_new_connections_until_healed(line, client):
    line.cut()
    with pytest.raises(RedisConnectionError):
        client.ping()
    with pytest.raises(RedisConnectionError):
        client.ping()

    line.heal()
    assert client.ping()


def test_nothing_reaches_the_server_through_a_deaf_proxy(line, client, redis_client, namespace):
    line.deaf()
    with pytest.raises(RedisTimeoutError):
        client.set(namespace, 1)
    with pytest.raises(RedisTimeoutError):
        connect(line)
    assert b"SET" in line.commands
    assert redis_client.get(namespace) is None

    line.heal()
    assert client.set(namespace, 2)
    assert redis_client.get(namespace) == b"2"


def test_a_connection_made_while_deaf_works_after_healing(line):
    line.deaf()
    raw = socket.create_connection((line.host, line.port), timeout=5)
    with raw:
        raw.sendall(b"ECHO swallowed\r\n")
        line.wait_for_commands(1)
        line.heal()
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"


def test_dropped_replies_belong_to_requests_that_were_executed(line, client, redis_client, namespace):
    line.drop_replies()
    with pytest.raises(RedisTimeoutError):
        client.incr(namespace)
    line.wait_for_lost(1)

    line.heal()
    assert redis_client.get(namespace) == b"1"
    assert client.incr(namespace) == 2


def test_exactly_the_reply_that_was_meant_is_dropped(line, client, namespace):
    line.drop_replies(count=1, after=2)
    assert client.incr(namespace) == 1
    assert client.incr(namespace) == 2
    with pytest.raises(RedisTimeoutError):
        client.incr(namespace)
    assert client.incr(namespace) == 4
    assert line.lost == 1


def test_only_the_replies_to_one_command_are_dropped(line, client, namespace):
    line.drop_replies(command=b"INCRBY")
    assert client.ping()
    with pytest.raises(RedisTimeoutError):
        client.incr(namespace)
    assert client.get(namespace) == b"1"


def test_the_connection_breaks_after_the_server_has_answered(line, client, redis_client, namespace):
    line.close_on_reply(command=b"INCRBY")
    with pytest.raises(RedisConnectionError):
        client.incr(namespace)
    assert redis_client.get(namespace) == b"1"
    assert client.incr(namespace) == 2  # once only, and over a new connection
    assert line.connections == 1


def test_a_reply_larger_than_the_buffers_arrives_whole(line, namespace):
    big = b"x" * 8_000_000
    with connect(line, timeout=10) as client:
        client.set(namespace, big)
        assert client.get(namespace) == big
        client.delete(namespace)


def test_a_server_that_is_down_is_seen_as_a_broken_connection(private_redis, proxy):
    line = proxy(private_redis.host, private_redis.port)
    client = connect(line)
    private_redis.kill()
    with pytest.raises(RedisConnectionError):
        client.ping()
    with pytest.raises(RedisConnectionError):
        client.ping()
    private_redis.start()
    assert client.ping()
    client.close()


def test_postgresql_does_not_notice_that_a_client_hung_up_on_a_deaf_line(database_url, proxy):
    url = make_url(database_url).set(drivername="postgresql")
    line = proxy(url.host, url.port, resp=False)
    through = url.set(host=line.host, port=line.port)
    observer = psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
    client = psycopg.connect(through.render_as_string(hide_password=False))
    with observer:
        assert client.execute("select 1, pg_advisory_xact_lock(1)").fetchone()[0] == 1
        assert line.requests > 0
        assert line.commands == []

        line.deaf()
        client.close()
        assert observer.execute("select pg_try_advisory_xact_lock(1)").fetchone() == (False,)

        line.heal()
        observer.execute("select pg_advisory_xact_lock(1)")  # granted as soon as the server has noticed


def test_it_ends_within_a_second_and_leaves_no_thread_behind(redis_url):
    url = make_url(redis_url)
    before = threading.active_count()
    with Proxy(url.host, url.port) as line:
        client = connect(line)
        line.delay(60)
        assert threading.active_count() == before + 1
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert threading.active_count() == before
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        line.heal()
