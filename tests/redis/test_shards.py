"""Shards: a resource never changes its shard, and nobody is let in who would look for it in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import redis
from contract.subjects import Subject
from harness.sides import Side

from fencing.backends.base import Busy, Peek, Seen
from fencing.backends.redis import RedisBackend
from fencing.backends.wire import MAX_SHARDS, shard_of
from fencing.embedded import RedisServer
from fencing.errors import ConfigurationError

MakeSubject = Callable[..., Subject]

# For ever: a resource that moved to another shard would be held twice while two releases run side by side.
PINNED = {
    "invoice:42": (0, 0, 2, 1006),
    "a": (0, 1, 3, 579),
    "job:billing/2026-11": (0, 1, 1, 945),
    "Rechnung für Köln": (0, 1, 1, 457),
    "🔒": (0, 0, 0, 768),
    "{x}\r\n": (0, 0, 0, 736),
}


@pytest.mark.parametrize("resource", PINNED)
def test_a_resource_is_in_the_same_shard_for_ever(resource: str) -> None:
    assert tuple(shard_of(resource, shards) for shards in (1, 2, 4, 1024)) == PINNED[resource]


def test_four_shards_share_the_resources_about_evenly() -> None:
    shares = Counter(shard_of(f"invoice:{number}", 4) for number in range(4000))

    assert set(shares) == {0, 1, 2, 3}
    assert all(800 < share < 1200 for share in shares.values())


def test_each_shard_has_a_counter_of_its_own(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    subject = make_subject(server.url, shards=4)
    tokens: dict[int, list[int]] = {}
    for number in range(40):
        resource = f"invoice:{number}"
        tokens.setdefault(shard_of(resource, 4), []).append(subject.take(resource).token)

    for shard, minted in tokens.items():
        counter = admin.get(f"fencing:1:{{{subject.namespace}/{shard}}}:counter")
        assert int(counter) == minted[-1]
        assert minted == sorted(set(minted))
    assert admin.get(f"fencing:1:{{{subject.namespace}}}:shards") == b"4"


def test_tokens_of_different_shards_are_comparable(make_subject: MakeSubject, server: RedisServer) -> None:
    subject = make_subject(server.url, shards=4)
    tokens = [subject.take(f"invoice:{number}").token for number in range(20)]

    assert tokens == sorted(tokens), "each is lifted to the one clock of the server"


def test_two_backends_with_the_same_number_of_shards_meet(
    make_subject: MakeSubject, server: RedisServer
) -> None:
    taken = make_subject(server.url, shards=4).take("invoice:42")
    reply = make_subject(server.url, shards=4).acquire("invoice:42")

    assert isinstance(reply, Busy)
    assert reply.held_by.holder == taken.holder


def test_another_number_of_shards_is_refused_before_anything_is_taken(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    make_subject(server.url, shards=4).take("invoice:42")
    before = sorted(admin.keys())
    stranger = make_subject(server.url, shards=2)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"4.* shards in Redis and 2 here"):
            stranger.acquire("invoice:42")
        with pytest.raises(ConfigurationError, match=r"4.* shards in Redis and 2 here"):
            stranger.acquire("invoice:43")
    assert sorted(admin.keys()) == before


def test_one_shard_is_a_number_of_shards_too(make_subject: MakeSubject, server: RedisServer) -> None:
    make_subject(server.url).take("invoice:42")

    with pytest.raises(ConfigurationError, match=r"1.* shards in Redis and 4 here"):
        make_subject(server.url, shards=4).acquire("invoice:42")


def test_the_refusal_is_the_answer_to_each_command_of_a_batch(
    make_subject: MakeSubject, server: RedisServer
) -> None:
    make_subject(server.url, shards=4).take("invoice:42")
    stranger = make_subject(server.url, shards=2)
    answers = stranger.ask_many([Peek(stranger.target("invoice:42")), Peek(stranger.target("invoice:43"))])

    assert [type(answer) for answer in answers] == [ConfigurationError] * 2


def test_namespaces_have_numbers_of_shards_of_their_own(
    make_subject: MakeSubject, server: RedisServer, namespace: str
) -> None:
    make_subject(server.url, shards=4, namespace=f"{namespace}.a").take("invoice:42")

    make_subject(server.url, shards=2, namespace=f"{namespace}.b").take("invoice:42")


def test_the_loss_of_all_data_does_not_let_another_number_pass_unseen(
    make_subject: MakeSubject, server: RedisServer
) -> None:
    subject = make_subject(server.url, shards=4)
    subject.take("invoice:42")
    subject.forget()
    make_subject(server.url, shards=2).take("invoice:42")

    with pytest.raises(ConfigurationError):
        make_subject(server.url, shards=4).acquire("invoice:42")


def test_several_resources_of_one_shard_are_one_lease(make_subject: MakeSubject, server: RedisServer) -> None:
    subject = make_subject(server.url, shards=4)
    together = [name for name in map("invoice:{}".format, range(40)) if shard_of(name, 4) == 3]
    taken = subject.take(*together)

    assert len(together) > 3
    assert {subject.peek(resource).token for resource in together} == {taken.token}


def test_resources_of_different_shards_are_no_lease(
    make_side: Callable[..., Side], server: RedisServer
) -> None:
    side = make_side(server.url, shards=4)
    spread = [f"invoice:{number}" for number in range(5)]

    with pytest.raises(ConfigurationError, match=r"invoice:0, .* are in different shards"):
        acquire_all(side, spread)
    assert [side.peek(resource) for resource in spread] == [None] * 5


def acquire_all(side: Side, resources: list[str]) -> object:
    if side.name == "sync":
        return side.leases.acquire_all(resources)

    async def take() -> object:
        return await side.leases.acquire_all(resources)

    return side.do(take())


@pytest.mark.parametrize("shards", [0, -1, MAX_SHARDS + 1, True, 2.0, "4", None])
def test_only_a_sensible_number_of_shards_is_accepted(admin: redis.Redis, shards: object) -> None:
    with pytest.raises(ConfigurationError, match=str(MAX_SHARDS)):
        RedisBackend(admin, shards=shards)


def test_the_largest_number_of_shards_works(make_subject: MakeSubject, server: RedisServer) -> None:
    subject = make_subject(server.url, shards=MAX_SHARDS)
    subject.take("invoice:42")

    assert isinstance(subject.ask(Peek(subject.target("invoice:42"))), Seen)
