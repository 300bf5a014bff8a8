"""Trouble in Redis: each kind is the right error, it is told plainly, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis
from contract.subjects import Subject
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fencing.backends.base import (
    Acquire,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Peek,
    Poisoned,
    Release,
    Remint,
    Renew,
    Reply,
)
from fencing.backends.wire import decode, pack_target
from fencing.embedded import RedisServer
from fencing.errors import BackendUnavailable, ConfigurationError, FencingError

MakeSubject = Callable[..., Subject]


def key(subject: Subject, rest: str) -> str:
    return f"fencing:1:{{{subject.namespace}/0}}:{rest}"


def every_command(subject: Subject, *resources: str) -> list[Command]:
    target, holder = subject.target(*resources), subject.fresh_holder()
    return [
        Acquire(target, holder, "", 60_000),
        Renew(target, holder, 60_000),
        Remint(target, holder, 0),
        Release(target, holder),
        Peek(target),
    ]


# Keys of ours that hold something else.


def test_a_lease_key_of_another_type_is_a_matter_of_configuration(
    subject: Subject, admin: redis.Redis
) -> None:
    admin.rpush(key(subject, "lease:invoice:42"), "somebody", "else's")

    for command in every_command(subject, "invoice:42"):
        with pytest.raises(ConfigurationError, match="WRONGTYPE"):
            subject.ask(command)
    assert admin.lrange(key(subject, "lease:invoice:42"), 0, -1) == [b"somebody", b"else's"]
    subject.take("invoice:43")


def test_a_lease_key_of_another_type_keeps_a_set_from_being_taken(
    subject: Subject, admin: redis.Redis
) -> None:
    admin.rpush(key(subject, "lease:invoice:42"), "somebody else's")

    with pytest.raises(ConfigurationError):
        subject.acquire("invoice:41", "invoice:42")
    assert subject.is_free("invoice:41")


def test_a_key_of_another_type_is_named(subject: Subject, admin: redis.Redis) -> None:
    admin.rpush(key(subject, "lease:invoice:42"), "somebody else's")

    with pytest.raises(ConfigurationError, match="invoice:42"):
        subject.acquire("invoice:42")


def test_a_counter_of_another_type_is_a_matter_of_configuration(subject: Subject, admin: redis.Redis) -> None:
    admin.hset(key(subject, "counter"), "somebody", "else's")

    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        subject.acquire("invoice:42")
    assert subject.is_free("invoice:42")
    assert admin.hgetall(key(subject, "counter")) == {b"somebody": b"else's"}


def test_a_held_lease_lives_on_when_the_counter_is_of_another_type(
    subject: Subject, admin: redis.Redis
) -> None:
    taken = subject.take("invoice:42")
    admin.delete(key(subject, "counter"))
    admin.hset(key(subject, "counter"), "somebody", "else's")

    assert subject.renew("invoice:42", holder=taken.holder) == Done()
    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    assert subject.peek("invoice:42").token == taken.token
    assert subject.release("invoice:42", holder=taken.holder) == Done()


def test_a_counter_that_is_no_number_lets_nothing_be_taken(subject: Subject, admin: redis.Redis) -> None:
    admin.set(key(subject, "counter"), "eleven")

    with pytest.raises(FencingError, match="not an integer"):
        subject.acquire("invoice:42")
    assert subject.is_free("invoice:42")
    assert admin.get(key(subject, "counter")) == b"eleven"


@pytest.mark.parametrize("counter", [2**53 - 1, 2**53, 2**62])
def test_a_counter_at_the_end_of_the_range_lets_nothing_be_taken(
    subject: Subject, admin: redis.Redis, counter: int
) -> None:
    admin.set(key(subject, "counter"), counter)

    assert subject.acquire("invoice:42") == Poisoned(0)
    assert subject.is_free("invoice:42")


def test_a_note_of_another_type_is_a_matter_of_configuration(subject: Subject, admin: redis.Redis) -> None:
    admin.rpush(key(subject, "note:invoice:42"), "somebody else's")

    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        subject.acquire("invoice:42")
    assert subject.is_free("invoice:42")
    assert admin.lrange(key(subject, "note:invoice:42"), 0, -1) == [b"somebody else's"]


def test_a_note_of_another_type_keeps_a_set_from_being_taken(subject: Subject, admin: redis.Redis) -> None:
    admin.rpush(key(subject, "note:invoice:42"), "somebody else's")

    with pytest.raises(ConfigurationError):
        subject.acquire("invoice:41", "invoice:42")
    assert subject.is_free("invoice:41")


def test_hold_times_of_another_type_do_not_hinder_a_release(subject: Subject, admin: redis.Redis) -> None:
    taken = subject.take("invoice:42")
    admin.set(key(subject, "holds"), "somebody else's")

    assert subject.release("invoice:42", holder=taken.holder) == Done()


def test_a_number_of_shards_of_another_type_is_a_matter_of_configuration(
    subject: Subject, admin: redis.Redis
) -> None:
    admin.rpush(f"fencing:1:{{{subject.namespace}}}:shards", "somebody else's")

    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        subject.acquire("invoice:42")


GARBAGE = {
    "a word": b"garbage",
    "nothing": b"",
    "another version": b"2 " + b"a" * 32 + b" 1795008453170711 1795008453170711 h ",
    "a short one": b"1 " + b"a" * 32 + b" 1795008453170711",
    "no holder": b"1 " + b"-" * 32 + b" 1795008453170711 1795008453170711 h ",
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_a_lease_key_is_a_matter_of_configuration(
    subject: Subject, admin: redis.Redis, garbage: bytes
) -> None:
    admin.set(key(subject, "lease:invoice:42"), garbage)

    for command in every_command(subject, "invoice:42"):
        with pytest.raises(ConfigurationError, match="invoice:42"):
            subject.ask(command)
    assert admin.get(key(subject, "lease:invoice:42")) == garbage
    subject.take("invoice:43")


@pytest.mark.parametrize("what", ["token", "time"])
def test_garbage_in_the_place_of_a_number_is_an_error(
    subject: Subject, admin: redis.Redis, what: str
) -> None:
    number = {"token": b"1795008453170711", "time": b"1795008453170711"} | {what: b"not.a.number.---"}
    value = b"1 " + b"a" * 32 + b" %b %b h worker" % (number["token"], number["time"])
    admin.set(key(subject, "lease:invoice:42"), value)

    for command in every_command(subject, "invoice:42"):
        with pytest.raises(FencingError):
            subject.ask(command)
    assert admin.get(key(subject, "lease:invoice:42")) == value


def test_garbage_is_the_answer_to_its_own_command_of_a_batch_only(
    subject: Subject, admin: redis.Redis
) -> None:
    admin.set(key(subject, "lease:invoice:42"), "garbage")
    admin.rpush(key(subject, "lease:invoice:43"), "somebody else's")
    taken = subject.take("invoice:44")
    targets = [subject.target(f"invoice:{number}") for number in (42, 43, 44)]
    replies = subject.ask_many([Renew(target, taken.holder, 60_000) for target in targets])

    assert [type(reply) for reply in replies] == [ConfigurationError, ConfigurationError, Done]


def test_a_lease_of_a_future_state_is_busy(subject: Subject, admin: redis.Redis) -> None:
    subject.take("invoice:42", label="worker 7")
    value = admin.get(key(subject, "lease:invoice:42"))
    admin.set(key(subject, "lease:invoice:42"), value[:69] + b"g" + value[70:], keepttl=True)
    reply = subject.acquire("invoice:42")

    assert isinstance(reply, Busy)
    assert reply.held_by.label == "worker 7"


# A user that may not.


def test_a_user_that_may_run_no_scripts_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "+get")

    with pytest.raises(ConfigurationError, match="NOPERM"):
        make_subject(server.url, username="worker", password="pw").acquire("invoice:42")


def test_a_user_that_may_not_touch_our_keys_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~other:*", "+@all")

    with pytest.raises(ConfigurationError, match="NOPERM"):
        make_subject(server.url, username="worker", password="pw").acquire("invoice:42")


def test_a_user_that_may_not_run_a_command_of_a_script_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "+@all", "-incr")

    with pytest.raises(ConfigurationError):
        make_subject(server.url, username="worker", password="pw").acquire("invoice:42")


def test_a_user_that_may_not_greet_the_server_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "+@all", "-client")
    subject = make_subject(server.url, username="worker", password="pw", client_name="worker")

    with pytest.raises(ConfigurationError):
        subject.acquire("invoice:42")


def test_a_user_that_was_disabled_is_refused(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "off", ">pw", "~*", "+@all")

    with pytest.raises(ConfigurationError):
        make_subject(server.url, username="worker", password="pw").acquire("invoice:42")


# A server that cannot, now.


@pytest.fixture
def out_of_memory(admin: redis.Redis) -> Iterator[Callable[[], object]]:
    """Call it, and there is no memory left."""
    yield lambda: admin.config_set("maxmemory", 1)
    admin.config_set("maxmemory", 0)


def test_a_server_out_of_memory_is_unavailable(
    subject: Subject, admin: redis.Redis, out_of_memory: Callable[[], object]
) -> None:
    subject.take("invoice:42")
    before = admin.get(key(subject, "counter"))
    out_of_memory()

    with pytest.raises(BackendUnavailable, match="OOM"):
        subject.acquire("invoice:43")
    assert subject.is_free("invoice:43")
    assert admin.get(key(subject, "counter")) == before


def test_a_server_out_of_memory_is_unavailable_from_the_first_use_on(
    subject: Subject, out_of_memory: Callable[[], object]
) -> None:
    out_of_memory()

    with pytest.raises(BackendUnavailable, match="OOM"):
        subject.acquire("invoice:42")


def test_leases_are_renewed_and_released_by_a_server_out_of_memory(
    subject: Subject, out_of_memory: Callable[[], object]
) -> None:
    taken = subject.take("invoice:42")
    out_of_memory()

    assert subject.renew("invoice:42", holder=taken.holder) == Done()
    assert subject.acquire("invoice:42", holder=taken.holder) == Granted(taken.token)
    assert subject.release("invoice:42", holder=taken.holder) == Done()
    assert subject.is_free("invoice:42")


@pytest.fixture
def demote(admin: redis.Redis) -> Iterator[Callable[[], object]]:
    """Call it, and the server is a read-only replica of a server that cannot be reached."""
    yield lambda: admin.replicaof("127.0.0.1", "1")
    admin.replicaof("NO", "ONE")


def test_a_read_only_replica_is_unavailable(subject: Subject, demote: Callable[[], object]) -> None:
    taken = subject.take("invoice:42")
    demote()

    with pytest.raises(BackendUnavailable, match="READONLY"):
        subject.acquire("invoice:43")
    with pytest.raises(BackendUnavailable, match="READONLY"):
        subject.renew("invoice:42", holder=taken.holder)
    with pytest.raises(BackendUnavailable, match="READONLY"):
        subject.release("invoice:42", holder=taken.holder)
    assert subject.peek("invoice:42").holder == taken.holder


def test_a_read_only_replica_is_unavailable_from_the_first_use_on(
    subject: Subject, demote: Callable[[], object]
) -> None:
    demote()

    with pytest.raises(BackendUnavailable, match="READONLY"):
        subject.acquire("invoice:42")


def test_a_replica_that_was_promoted_goes_on_with_what_it_has(
    subject: Subject, admin: redis.Redis, demote: Callable[[], object]
) -> None:
    taken = subject.take("invoice:42")
    demote()
    with pytest.raises(BackendUnavailable):
        subject.acquire("invoice:43")
    admin.replicaof("NO", "ONE")

    assert subject.take("invoice:43").token > taken.token
    assert subject.renew("invoice:42", holder=taken.holder) == Done()


def test_a_busy_server_is_unavailable_and_comes_back(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    subject = make_subject(server.url)
    taken = subject.take("invoice:42")
    admin.client_pause(100)

    with pytest.raises(BackendUnavailable, match="too long"):
        subject.ask(Renew(taken.target, taken.holder, 60_000), timeout=0.02)
    assert subject.renew("invoice:42", holder=taken.holder) == Done()


# Replies that none of our scripts gives.

LEASE = b"1 " + b"a" * 32 + b" 1795008453170711 1795008453170711 h worker 7"
TARGET = pack_target("billing", ("invoice:42", "invoice:43"), 1)
COMMANDS = [
    Acquire(TARGET, "a" * 32, "", 60_000),
    Renew(TARGET, "a" * 32, 60_000),
    Remint(TARGET, "a" * 32, 0),
    Release(TARGET, "a" * 32),
    Peek(TARGET),
]

statuses = st.sampled_from([b"granted", b"done", b"busy", b"not held", b"seen", b"poisoned", b"", b"?"])
mangled = st.builds(
    lambda at, piece: LEASE[:at] + piece + LEASE[at + len(piece) :],
    st.integers(0, len(LEASE)),
    st.binary(max_size=20),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=80),
    st.text(max_size=10),
    statuses,
    mangled,
    st.just(LEASE),
    st.just(b"1795008453170711"),
)
replies = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(scalars, inner, max_size=2)
)
likely_replies = st.builds(lambda status, rest: [status, *rest], statuses, st.lists(scalars, max_size=6))


@settings(deadline=None, derandomize=True, database=None, max_examples=600)
@given(st.sampled_from(COMMANDS), replies | likely_replies)
@example(Peek(TARGET), [b"seen", LEASE, -1])
@example(Peek(TARGET), [b"seen"])
@example(Peek(TARGET), [b"busy", -3, LEASE, 5])
@example(Peek(TARGET), [b"granted", b"9" * 5000])
@example(Peek(TARGET), [b"granted", b"0"])
@example(Peek(TARGET), [b"granted", b"1", 0])
@example(Peek(TARGET), [[b"granted"], b"1"])
def test_any_reply_means_something_or_is_refused_as_an_error_of_ours(command: Command, raw: object) -> None:
    try:
        meaning = decode(command, raw)
    except FencingError:
        return
    assert isinstance(meaning, Reply)


def test_a_time_that_no_float_can_hold_is_refused_as_an_error_of_ours() -> None:
    with pytest.raises(FencingError):
        decode(Peek(TARGET), [b"seen", LEASE, 10**400])


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"OK",
        [],
        [b"granted"],
        [b"granted", b"0"],
        [b"granted", b"-1"],
        [b"granted", b"%d" % 2**53],
        [b"granted", 1795008453170711],
        [b"granted", b"1795008453170711", 0, LEASE],
        [b"granted", b"1795008453170711", 9, LEASE, 5],
        [b"busy", 9, LEASE, 5],
        [b"busy", 0, None, 5],
        [b"busy", 0, LEASE, None],
        [b"not held", 0],
        [b"mumble"],
    ],
    ids=repr,
)
def test_a_reply_that_means_nothing_is_as_good_as_none(raw: object) -> None:
    with pytest.raises(BackendUnavailable, match="means nothing") as failure:
        decode(COMMANDS[0], raw)
    assert failure.value.sent, "it may have been done"


def test_the_replies_of_our_scripts_are_understood() -> None:
    acquire = COMMANDS[0]
    busy = decode(acquire, [b"busy", 1, LEASE, 1500])
    assert isinstance(busy, Busy)
    assert (busy.held_by.resource, busy.held_by.time_left) == ("invoice:43", 1.5)
    assert decode(acquire, [b"granted", b"1795008453170711"]) == Granted(1795008453170711)
    assert decode(acquire, [b"poisoned"]) == Poisoned(0)
    assert decode(COMMANDS[1], [b"done"]) == Done()
    assert decode(COMMANDS[1], [b"not held", 1, None, -2]) == NotHeld("invoice:43", None)
