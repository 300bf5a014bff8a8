"""What stands in Redis: the names of the keys, the layout of a value, what lives for how long."""

from __future__ import annotations

import pytest
import redis
from contract.subjects import LONG, Subject
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from fencing.backends.base import Busy, Done, Granted, NotHeld, Target
from fencing.backends.wire import pack_target, shards_key

HOUR_MS = 3_600_000

NAMES = {
    "colon": "invoice:42",
    "spaces": "  an invoice ",
    "braces": "{invoice}",
    "hash tag of another shard": "{other/0}:counter",
    "closing brace": "}:counter",
    "slash": "a/0",
    "line ends": "a\r\n$3\r\nfoo\r\n",
    "newline": "a\nb",
    "nul": "a\0b",
    "umlaut": "Rechnung für Köln",
    "lock": "🔒",
    "glob": "*",
    "prefix": "fencing:1:{x/0}:lease:y",
    "as long as may be": "x" * 1024,
    "as long as may be in bytes": "ä" * 512,
}

calm = settings(deadline=None, derandomize=True, database=None)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
awkward_names = st.text(st.sampled_from("{}/:\r\n$*\0 ax0"), min_size=1, max_size=12)
resources = names | awkward_names
namespaces = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


def keys_of(target: Target) -> list[bytes]:
    """The keys as a server would read them, and not one byte more."""
    words, rest = [], target.packed
    while rest:
        head, _, rest = rest.partition(b"\r\n")
        assert head[:1] == b"$"
        size = int(head[1:])
        word, end, rest = rest[:size], rest[size : size + 2], rest[size + 2 :]
        assert end == b"\r\n"
        words.append(word)
    assert int(words[0]) == len(words) - 1
    return words[1:]


def stored_keys(admin: redis.Redis, namespace: str) -> set[str]:
    return {key.decode() for key in admin.scan_iter() if namespace.encode() in key}


def test_a_held_lease_is_these_keys(subject: Subject, admin: redis.Redis) -> None:
    subject.take("invoice:42")
    tag = f"fencing:1:{{{subject.namespace}/0}}:"

    assert stored_keys(admin, subject.namespace) == {
        f"fencing:1:{{{subject.namespace}}}:shards",
        f"{tag}counter",
        f"{tag}lease:invoice:42",
        f"{tag}note:invoice:42",
    }


def hold_one_that_counts(subject: Subject, resource: str) -> None:
    """Hold and release until one is counted in the histogram: a tenth of them is."""
    while True:
        taken = subject.take(resource)
        subject.release(resource, holder=taken.holder)
        if taken.token % 10 == 0:
            return


def test_a_released_lease_leaves_the_counter_and_the_hold_times(subject: Subject, admin: redis.Redis) -> None:
    hold_one_that_counts(subject, "invoice:42")
    tag = f"fencing:1:{{{subject.namespace}/0}}:"

    assert stored_keys(admin, subject.namespace) == {
        f"fencing:1:{{{subject.namespace}}}:shards",
        f"{tag}counter",
        f"{tag}holds",
    }


def test_a_million_resources_would_need_one_counter(subject: Subject, admin: redis.Redis) -> None:
    for number in range(5):
        hold_one_that_counts(subject, f"invoice:{number}")

    assert len(stored_keys(admin, subject.namespace)) == 3


@pytest.mark.parametrize("resource", NAMES.values(), ids=NAMES)
def test_a_resource_may_have_any_name(subject: Subject, admin: redis.Redis, resource: str) -> None:
    taken = subject.take(resource)
    key = f"fencing:1:{{{subject.namespace}/0}}:lease:{resource}".encode()

    assert admin.get(key)[2:34].decode() == taken.holder
    assert subject.peek(resource).resource == resource
    assert isinstance(subject.acquire(resource), Busy)
    assert subject.renew(resource, holder=taken.holder) == Done()
    assert subject.release(resource, holder=taken.holder) == Done()
    assert not admin.exists(key)


def test_resources_of_all_names_are_held_side_by_side(subject: Subject) -> None:
    names = list(NAMES.values())
    holders = [subject.take(name).holder for name in names]

    assert [subject.peek(name).holder for name in names] == holders


@calm
@given(st.lists(resources, min_size=1, max_size=4, unique=True))
def test_the_keys_of_a_target_are_its_names_and_nothing_else(chosen: list[str]) -> None:
    tag = "fencing:1:{billing/0}:"
    expected = [f"{tag}counter", f"{tag}holds"]
    for resource in chosen:
        expected += [f"{tag}lease:{resource}", f"{tag}note:{resource}"]

    assert keys_of(pack_target("billing", tuple(chosen), 1)) == [key.encode() for key in expected]


@calm
@given(st.lists(st.tuples(namespaces, resources), min_size=2, max_size=2, unique=True))
def test_different_resources_have_different_keys(pairs: list[tuple[str, str]]) -> None:
    (namespace, one), (other_namespace, another) = pairs
    keys = keys_of(pack_target(namespace, (one,), 1))
    other_keys = keys_of(pack_target(other_namespace, (another,), 1))
    common = set(keys) & set(other_keys)

    assert common == (set(keys[:2]) if namespace == other_namespace else set())


@calm
@given(namespaces, resources)
def test_no_resource_can_pass_for_a_counter_or_a_number_of_shards(namespace: str, resource: str) -> None:
    counter, holds, lease, note = keys_of(pack_target(namespace, (resource,), 1))

    assert len({counter, holds, lease, note, shards_key(namespace).encode()}) == 5


@calm
@given(namespaces, resources, st.integers(1, 1024))
def test_all_keys_of_a_shard_are_in_one_slot_of_a_cluster(namespace: str, resource: str, shards: int) -> None:
    assert len({key_slot(key) for key in keys_of(pack_target(namespace, (resource,), shards))}) == 1


@calm
@given(namespaces, resources, resources, st.integers(1, 1024))
def test_the_hash_tag_is_the_shard_whatever_the_resource(
    namespace: str, one: str, another: str, shards: int
) -> None:
    counter, *keys = keys_of(pack_target(namespace, (one,), shards))
    other_counter, *other_keys = keys_of(pack_target(namespace, (another,), shards))

    same_shard = counter == other_counter
    assert not same_shard or {key_slot(key) for key in keys} == {key_slot(key) for key in other_keys}
    tag = counter[counter.index(b"{") + 1 : counter.index(b"}")]
    assert key_slot(tag) == key_slot(keys[1])


def test_a_value_is_version_holder_token_time_state_and_label(subject: Subject, admin: redis.Redis) -> None:
    before = subject.wall_us()
    taken = subject.take("invoice:42", label="host 7: größer")
    value = admin.get(f"fencing:1:{{{subject.namespace}/0}}:lease:invoice:42")
    version, holder, token, acquired_at, state, label = value.split(b" ", 5)

    assert version == b"1"
    assert holder.decode() == taken.holder
    assert len(token) == 16
    assert int(token) == taken.token
    assert len(acquired_at) == 16
    assert before <= int(acquired_at) <= subject.wall_us()
    assert state == b"h"
    assert label.decode() == "host 7: größer"


def test_a_note_is_a_copy_of_the_lease(subject: Subject, admin: redis.Redis) -> None:
    taken = subject.take("invoice:42", label="host 7")
    tag = f"fencing:1:{{{subject.namespace}/0}}:"
    assert admin.get(f"{tag}note:invoice:42") == admin.get(f"{tag}lease:invoice:42")

    subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    assert admin.get(f"{tag}note:invoice:42") == admin.get(f"{tag}lease:invoice:42")


def test_a_remint_changes_the_token_and_nothing_else(subject: Subject, admin: redis.Redis) -> None:
    taken = subject.take("invoice:42", label="host 7")
    key = f"fencing:1:{{{subject.namespace}/0}}:lease:invoice:42"
    before = admin.get(key)
    reply = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)

    assert isinstance(reply, Granted)
    assert admin.get(key) == before[:35] + b"%016d" % reply.token + before[51:]


def test_the_counter_is_the_highest_token_in_plain_digits(subject: Subject, admin: redis.Redis) -> None:
    floor = subject.wall_us() + 10**12
    token = subject.take("invoice:42", floor=floor).token

    assert admin.get(f"fencing:1:{{{subject.namespace}/0}}:counter") == b"%d" % token == b"%d" % (floor + 1)


def test_a_lease_lives_for_its_ttl_and_its_note_an_hour_longer(subject: Subject, admin: redis.Redis) -> None:
    ttl_ms = round(LONG * 1000)
    taken = subject.take("invoice:42", ttl=LONG)
    tag = f"fencing:1:{{{subject.namespace}/0}}:"
    assert ttl_ms - 10_000 < admin.pttl(f"{tag}lease:invoice:42") <= ttl_ms
    assert HOUR_MS + ttl_ms - 10_000 < admin.pttl(f"{tag}note:invoice:42") <= HOUR_MS + ttl_ms

    subject.renew("invoice:42", holder=taken.holder, ttl=2 * LONG)
    assert 2 * ttl_ms - 10_000 < admin.pttl(f"{tag}lease:invoice:42") <= 2 * ttl_ms
    assert HOUR_MS + 2 * ttl_ms - 10_000 < admin.pttl(f"{tag}note:invoice:42") <= HOUR_MS + 2 * ttl_ms


def test_a_remint_keeps_the_ttl_of_lease_and_note(subject: Subject, admin: redis.Redis) -> None:
    taken = subject.take("invoice:42", ttl=LONG)
    subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    tag = f"fencing:1:{{{subject.namespace}/0}}:"

    assert 0 < admin.pttl(f"{tag}lease:invoice:42") <= LONG * 1000
    assert HOUR_MS < admin.pttl(f"{tag}note:invoice:42") <= HOUR_MS + LONG * 1000


def test_what_must_not_be_forgotten_has_no_ttl(subject: Subject, admin: redis.Redis) -> None:
    taken = subject.take("invoice:42")
    subject.release("invoice:42", holder=taken.holder)

    assert {admin.pttl(key) for key in stored_keys(admin, subject.namespace)} == {-1}


def test_a_lease_without_a_note_leaves_none(subject: Subject, admin: redis.Redis) -> None:
    subject.take("invoice:42", note=False)

    assert not admin.exists(f"fencing:1:{{{subject.namespace}/0}}:note:invoice:42")


def test_a_tenth_of_the_releases_is_counted_in_the_histogram_of_hold_times(
    subject: Subject, admin: redis.Redis
) -> None:
    """Those whose token ends in 0: which they are, the microseconds of the clock decide."""
    tokens = []
    while not any(token % 10 == 0 for token in tokens) or len(tokens) < 20:
        taken = subject.take("invoice:1", "invoice:2")
        tokens.append(taken.token)
        subject.release("invoice:1", "invoice:2", holder=taken.holder)
        assert subject.release("invoice:1", holder=taken.holder) == NotHeld("invoice:1", None)
    counts = admin.hgetall(f"fencing:1:{{{subject.namespace}/0}}:holds")

    assert sum(map(int, counts.values())) == len([token for token in tokens if token % 10 == 0])
    assert all(int(exponent) <= 10 for exponent in counts)  # less than 2^10 ms each


@pytest.mark.parametrize(("held_ms", "exponent"), [(700, 10), (1500, 11), (90_000, 17), (5_000_000, 23)])
def test_a_hold_time_is_counted_under_the_power_of_two_above_it(
    subject: Subject, admin: redis.Redis, held_ms: int, exponent: int
) -> None:
    taken = subject.take("invoice:42")
    key = f"fencing:1:{{{subject.namespace}/0}}:lease:invoice:42"
    value = admin.get(key)
    value = value[:50] + b"0" + value[51:]  # a token that is counted
    earlier = b"%016d" % (int(value[52:68]) - held_ms * 1000)
    admin.set(key, value[:52] + earlier + value[68:], keepttl=True)
    subject.release("invoice:42", holder=taken.holder)

    holds = f"fencing:1:{{{subject.namespace}/0}}:holds"
    assert admin.hgetall(holds) == {b"%d" % exponent: b"1"}
    assert 2 ** (exponent - 1) <= held_ms < 2**exponent
