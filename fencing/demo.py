"""The story on this machine: a worker freezes, another takes over, the first wakes up and is refused.

``python -m fencing.demo`` starts a private PostgreSQL and Redis, runs two real worker processes against them
twice, once with the token compared in the database and once without, and ends everything it started.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import redis
import sqlalchemy as sa

from fencing.embedded import PostgresServer, RedisServer
from fencing.errors import FencingError
from fencing.lease import Leases
from fencing.sql import fence_columns, guarded, install

TTL = 1.0
ACCOUNT = 42
RESOURCE = f"account:{ACCOUNT}"
VERBS = {"renewed": "renew", "released": "release", "wrote": "write"}

accounts = sa.Table(
    "demo_account",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("balance", sa.Integer, nullable=False),
    *fence_columns(),
)


# The worker: a process of its own, that tells what it does in lines of JSON and waits to be told to write.


def worker(redis_url: str, database_url: str, name: str, amount: str, guard: str) -> None:
    leases = Leases(redis.Redis.from_url(redis_url), namespace="demo", label=name, observers=[])
    engine = sa.create_engine(database_url)
    if guard == "on":
        install(engine)
    lease = leases.acquire(RESOURCE, ttl=TTL, wait=30)
    say(did="acquired", token=lease.token)
    with engine.connect() as connection:
        balance = connection.execute(sa.select(accounts.c.balance).filter_by(id=ACCOUNT)).scalar_one()
    say(did="read", balance=balance)
    sys.stdin.readline()
    proof = lease.grant  # all that it knows: a grant alone is not told that the lease is lost

    def write() -> None:
        with engine.begin() as connection, guarded(connection, proof) if guard == "on" else nullcontext():
            connection.execute(
                accounts.update().where(accounts.c.id == ACCOUNT).values(balance=balance + int(amount))
            )

    if name == "A":  # the one that slept tries everything first
        say(did="renewed", refused=refusal(lease.renew))
        say(did="released", refused=refusal(lease.release))
    say(did="wrote", balance=balance + int(amount), refused=refusal(write))
    if name != "A":
        say(did="released", refused=refusal(lease.release))
    engine.dispose()


def refusal(verb: Any) -> str | None:
    try:
        verb()
    except FencingError as error:
        return type(error).__name__
    return None


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


# The director.


class Worker:
    """A worker process, and what it said."""

    def __init__(self, name: str, amount: int, servers: tuple[str, str], guard: bool, tell: Teller) -> None:
        command = [sys.executable, "-m", "fencing.demo", "--worker", *servers, name, str(amount)]
        self.name = name
        self._tell = tell
        self._process = subprocess.Popen(
            [*command, "on" if guard else "off"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self, did: str) -> dict[str, Any]:
        """Wait until the worker says that it did (or was refused) this."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            self._tell(self.name, said)
            if said["did"] == did:
                return said
        raise RuntimeError(f"worker {self.name} ended before it {did}")

    def signal(self, number: signal.Signals, text: str) -> None:
        self._process.send_signal(number)
        self._tell(self.name, {"did": text})

    def write(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("write\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Teller:
    """Prints what happens, with the time since the beginning."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, name: str, said: dict[str, Any]) -> None:
        detail = {
            key: value for key, value in said.items() if key not in ("did", "refused") and value is not None
        }
        refused = said.get("refused")
        text = said["did"] if refused is None else f"{VERBS[said['did']]:8} REFUSED  ({refused})"
        column = 0 if name == "A" else 44
        words = " ".join([text, *(f"{key} {value}" for key, value in detail.items() if refused is None)])
        print(f"  {time.monotonic() - self._began:5.2f}s  {' ' * column}{name}: {words}")


def run(engine: sa.Engine, servers: tuple[str, str], *, guard: bool) -> int:
    """Two workers add 30 and 50 to an account of 100; the first one freezes. The balance in the end."""
    with engine.begin() as connection:
        accounts.metadata.drop_all(connection)
        accounts.metadata.create_all(connection)
        connection.execute(accounts.insert().values(id=ACCOUNT, balance=100))
    tell = Teller()
    with ended(Worker("A", 30, servers, guard, tell)) as first:
        first.hear("read")
        first.signal(signal.SIGSTOP, f"is frozen for longer than its TTL of {TTL:g} s")
        with ended(Worker("B", 50, servers, guard, tell)) as second:
            second.hear("read")
            second.write()
            second.hear("released")
        first.signal(signal.SIGCONT, "wakes up and goes on as if nothing had happened")
        first.write()
        first.hear("wrote")
    with engine.connect() as connection:
        balance: int = connection.execute(sa.select(accounts.c.balance)).scalar_one()
    return balance


@contextmanager
def ended(process: Worker) -> Iterator[Worker]:
    try:
        yield process
    finally:
        process.end()


def main() -> int:
    print("Starting a private PostgreSQL and Redis ...")
    with RedisServer() as store, PostgresServer() as database:
        engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        servers = (store.url, database.url)
        print(f"\nAccount {ACCOUNT} has 100. Worker A adds 30, worker B adds 50.\n")
        print("With guarded(connection, lease), so that the database compares tokens:\n")
        fenced = run(engine, servers, guard=True)
        print(
            f"\n  balance {fenced}: B's write stands, A's stale one was refused. A can do its work again.\n"
        )
        print("The same without the guard:\n")
        open_to_all = run(engine, servers, guard=False)
        print(
            f"\n  balance {open_to_all}: B's 50 are gone, overwritten from a stale read. Nobody was told.\n"
        )
        engine.dispose()
    if (fenced, open_to_all) != (150, 130):
        print(f"This is not how the story goes: expected 150 and 130, not {fenced} and {open_to_all}.")
        return 1
    print("A lease tells you that you probably hold a resource. The token lets the database know.")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        try:
            code = main()
        except KeyboardInterrupt:
            code = 130
        sys.stdout.flush()
        sys.exit(code)
