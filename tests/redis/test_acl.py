"""The least that a user of Redis must be allowed: `MINIMAL_ACL` is enough, and nothing in it is too much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from contract.subjects import LONG, Subject

from fencing.backends.base import Done, Granted
from fencing.embedded import RedisServer
from fencing.errors import ConfigurationError, FencingError

MINIMAL_ACL = (
    "resetchannels ~fencing:1:* "
    "+eval +evalsha +get +set +setnx +del +exists +incr +pexpire +pttl +time +hincrby"
)
"""What docs/howto/redis-acl.md recommends."""

ONE_NAMESPACE = "~fencing:1:{billing}:* ~fencing:1:{billing/*"

COMMANDS = [word for word in MINIMAL_ACL.split() if word.startswith("+")]
HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "redis-acl.md"

MakeSubject = Callable[..., Subject]


def allow(admin: redis.Redis, rules: str) -> None:
    """Let there be a user `worker` with these rules and no others."""
    admin.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">pw", *rules.split())


def log_of(admin: redis.Redis) -> set[str]:
    """What the user was refused: commands and keys."""
    return {entry["object"] for entry in admin.acl_log()}


def live_a_whole_life(subject: Subject) -> None:
    """Every branch of every script, so that each command in them is called."""
    taken = subject.take("invoice:42", "invoice:43")
    assert subject.acquire("invoice:42", "invoice:43", holder=taken.holder) == Granted(taken.token)
    subject.acquire("invoice:42")
    assert subject.renew("invoice:42", "invoice:43", holder=taken.holder, ttl=2 * LONG) == Done()
    subject.renew("invoice:42", holder=subject.fresh_holder())
    counted = (taken.token // 10) * 10 + 10**9  # a token that ends in 0 is counted when it is released
    reminted = subject.remint("invoice:42", "invoice:43", holder=taken.holder, floor=counted - 1)
    assert reminted == Granted(counted)
    subject.peek("invoice:42")
    assert subject.release("invoice:42", "invoice:43", holder=taken.holder) == Done()
    subject.release("invoice:42", holder=taken.holder)
    subject.abandoned("invoice:42")
    assert subject.take("invoice:42", note=False).reply.orphans


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_the_minimal_rules_are_enough_for_a_whole_life(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis, protocol: int
) -> None:
    allow(admin, MINIMAL_ACL)
    live_a_whole_life(make_subject(server.url, username="worker", password="pw", protocol=protocol))

    assert log_of(admin) <= {"client"}, "refused, and it did not matter: the client's name of its library"


def test_the_minimal_rules_are_enough_when_the_server_forgot_the_scripts(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    allow(admin, MINIMAL_ACL)
    subject = make_subject(server.url, username="worker", password="pw")
    live_a_whole_life(subject)
    admin.flushall()
    admin.script_flush()

    live_a_whole_life(subject)


def test_without_hincrby_only_the_hold_times_are_missing(
    sync_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    allow(admin, MINIMAL_ACL.replace("+hincrby", ""))
    live_a_whole_life(sync_subject(server.url, username="worker", password="pw"))
    assert "hincrby" in log_of(admin)


@pytest.mark.parametrize("command", [word for word in COMMANDS if word != "+hincrby"])
def test_without_any_of_the_commands_they_are_not_enough(
    sync_subject: MakeSubject, server: RedisServer, admin: redis.Redis, command: str
) -> None:
    allow(admin, " ".join(word for word in MINIMAL_ACL.split() if word != command))
    subject = sync_subject(server.url, username="worker", password="pw")

    with pytest.raises(FencingError):
        live_a_whole_life(subject)
    assert command[1:] in log_of(admin)


def test_no_other_key_can_be_touched(server: RedisServer, admin: redis.Redis) -> None:
    allow(admin, MINIMAL_ACL)
    admin.set("session:1", "secret")
    with redis.Redis.from_url(server.url, username="worker", password="pw") as worker:
        for attempt in (
            lambda: worker.get("session:1"),
            lambda: worker.set("session:1", "mine"),
            lambda: worker.delete("session:1"),
            lambda: worker.get("fencing:2:{x/0}:counter"),
            lambda: worker.eval("return redis.call('GET', KEYS[1])", 1, "session:1"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                attempt()
        with pytest.raises(redis.exceptions.ResponseError, match=r"can't access|permission"):
            worker.eval("return redis.call('GET', 'session:1')", 0)
    assert admin.get("session:1") == b"secret"


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "KEYS *",
        "SCAN 0",
        "CONFIG GET maxmemory",
        "SCRIPT FLUSH",
        "ACL LIST",
        "INFO",
        "SELECT 1",
        "PUBLISH channel message",
        "LPUSH fencing:1:x y",
        "RENAME fencing:1:x fencing:1:y",
        "DEBUG SLEEP 0",
        "SHUTDOWN",
        "CLIENT KILL TYPE normal",
    ],
)
def test_no_other_command_can_be_run(server: RedisServer, admin: redis.Redis, command: str) -> None:
    allow(admin, MINIMAL_ACL)
    with (
        redis.Redis.from_url(server.url, username="worker", password="pw") as worker,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        worker.execute_command(*command.split())


def test_a_client_with_a_name_needs_one_command_more(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    allow(admin, MINIMAL_ACL)
    with pytest.raises(FencingError):
        make_subject(server.url, username="worker", password="pw", client_name="w").acquire("invoice:42")

    allow(admin, f"{MINIMAL_ACL} +client|setname")
    make_subject(server.url, username="worker", password="pw", client_name="w").take("invoice:42")


def test_another_database_needs_one_command_more(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    url = f"redis://{server.host}:{server.port}/3"
    allow(admin, MINIMAL_ACL)
    with pytest.raises(FencingError):
        make_subject(url, username="worker", password="pw").acquire("invoice:42")

    allow(admin, f"{MINIMAL_ACL} +select")
    make_subject(url, username="worker", password="pw").take("invoice:42")


def test_a_user_can_be_kept_to_one_namespace(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    allow(admin, MINIMAL_ACL.replace("~fencing:1:*", ONE_NAMESPACE))
    credentials = {"username": "worker", "password": "pw"}
    live_a_whole_life(make_subject(server.url, namespace="billing", **credentials))

    for other in ("billing2", "billing.2", "shipping"):
        with pytest.raises(ConfigurationError, match="NOPERM"):
            make_subject(server.url, namespace=other, **credentials).acquire("invoice:42")
    assert not admin.keys("*shipping*")


def test_one_more_command_keeps_the_log_of_refusals_empty(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    allow(admin, f"{MINIMAL_ACL} +client|setinfo")
    live_a_whole_life(make_subject(server.url, username="worker", password="pw"))

    assert log_of(admin) == set()


def test_the_documentation_quotes_the_rules_that_were_tested() -> None:
    page = HOWTO.read_text()

    assert MINIMAL_ACL in page
    for more in (ONE_NAMESPACE, "+client|setname", "+select", "+client|setinfo"):
        assert more in page
