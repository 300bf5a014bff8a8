"""What users write, for the type checker: everything here must be accepted by ``mypy --strict``.

Never run. A line with ``type: ignore[code]`` is a mistake that must be found: were it not, the comment would be
unused, which is an error as well. (There must be no ``__init__.py`` here: this folder is not the module `typing`.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import assert_type

import redis
import redis.asyncio
from sqlalchemy import Connection, Engine, MetaData, Table
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencing import (
    AsyncLease,
    AsyncLeases,
    BackendUnavailable,
    Grant,
    HeldBy,
    Lease,
    LeaseLost,
    Leases,
    LeaseUnavailable,
    LoggingObserver,
    OutcomeUnknown,
    Policy,
    Renewal,
    RowMissing,
    StaleToken,
    UnguardedWrite,
    UnverifiableWrite,
    Wait,
    WrongResource,
)
from fencing.backends.base import Behind
from fencing.events import Acquired, Event, Lost
from fencing.policies import JOB_TRANSITION, periodic_loop
from fencing.sql import (
    AsyncGuardedRepository,
    Fenced,
    FencedSession,
    GuardedRepository,
    Written,
    fence,
    fence_columns,
    guarded,
    install,
    unguarded,
    using,
)
from fencing.testing import (
    AsyncMemoryBackend,
    AsyncMemoryLedger,
    FakeClock,
    MemoryBackend,
    MemoryLedger,
    supersede,
    supersede_async,
)

# Settings


class Counter:
    """An observer that says what it wants."""

    wants = (Acquired, Lost)

    def __call__(self, event: Event) -> None:
        print(event.name, event.namespace)


def observe(event: Event) -> None:
    if isinstance(event, Lost):
        print(event.reason, event.held_for)


class MyLedger:
    """A ledger of one's own needs two verbs and no base class."""

    def claim(self, grant: Grant) -> Behind | None:
        return None if grant.token > 0 else Behind(grant.token, grant.holder)

    def assert_current(self, grant: Grant) -> None: ...


def flag() -> Policy:
    return JOB_TRANSITION


def settings(client: redis.Redis) -> None:
    Leases(client)
    Leases(client, namespace="billing", label="worker 1", shards=4, clock=FakeClock())
    Leases(client, policy=flag, ledger=MyLedger())
    Leases(client, policy=periodic_loop(30), ledger=MemoryLedger())
    Leases(client, observers=[observe, Counter(), LoggingObserver(logging.getLogger("mine"))])
    leases = Leases(MemoryBackend())
    leases.policy = Policy(ttl=60, wait=Wait(budget=5), renewal=Renewal(failures=5, max_hold=3600))
    leases.policy = flag
    assert_type(leases.policy, Policy)
    Leases(client, namespaces="billing")  # type: ignore[call-arg]
    Leases(client, "billing")  # type: ignore[call-arg]
    Leases(client, policy=30)  # type: ignore[arg-type]
    Leases(client, ledger=AsyncMemoryLedger())  # type: ignore[arg-type]
    Leases(AsyncMemoryBackend())  # type: ignore[arg-type]
    Leases(redis.asyncio.Redis())  # type: ignore[arg-type]
    Leases(client, observers=[print, 5])  # type: ignore[list-item]
    Policy(60)  # type: ignore[call-arg]
    Renewal(on_failure="ignore")  # type: ignore[arg-type]


# Threads


def sync(leases: Leases) -> int:
    with leases.acquire("invoice:42", ttl=30) as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, int)
        assert_type(lease.grant, Grant)
        assert_type(lease.resources, tuple[str, ...])
        lease.check()
        lease.renew()
        lease.extend(60)
        if lease.held and lease.lost is None:
            assert_type(lease.time_left, float)
    held = leases.acquire("invoice:43", wait=Wait(budget=2.0), renewal=Renewal(), label="me", on_lost=tell)
    held.release()
    maybe = leases.try_acquire("invoice:44", ttl=5, hold_to_ttl=True)
    assert_type(maybe, Lease | None)
    with leases.acquire_all(["a", "b"], ttl=5, wait=1.0) as several:
        assert_type(several, Lease)
    assert_type(leases.peek("invoice:42"), HeldBy | None)
    with leases as same:
        assert_type(same, Leases)
    leases.close()
    with supersede(held) as other:
        assert_type(other, Lease)
    return held.token


def sync_mistakes(leases: Leases, held: Lease) -> None:
    leases.acquire("a", tll=30)  # type: ignore[call-arg]
    leases.acquire("a", 30)  # type: ignore[call-arg]
    leases.acquire(42)  # type: ignore[arg-type]
    leases.acquire("a", ttl="30")  # type: ignore[arg-type]
    leases.acquire("a", on_lost=lambda: None)  # type: ignore[arg-type, misc]
    leases.try_acquire("a", wait=5)  # type: ignore[call-arg]
    leases.try_acquire("a", tll=5)  # type: ignore[call-arg]
    leases.try_acquire("a").release()  # type: ignore[union-attr]
    leases.acquire_all(["a"], tll=5)  # type: ignore[call-arg]
    leases.acquire_all([1, 2])  # type: ignore[list-item]
    held.extend()  # type: ignore[call-arg]
    held.token = 7  # type: ignore[misc]
    held.key  # type: ignore[attr-defined]  # noqa: B018


def tell(lost: LeaseLost) -> None:
    print(lost.resource, lost.reason)


def errors(leases: Leases) -> float | None:
    try:
        leases.acquire("a")
    except LeaseUnavailable as busy:
        assert_type(busy.held_by, HeldBy | None)
        return busy.retry_after
    except BackendUnavailable as down:
        assert_type(down.sent, bool)
    except StaleToken as stale:
        assert_type(stale.stored_token, int)
    return None


def decorated(leases: Leases) -> None:
    @leases.holding("invoice:{invoice_id}", ttl=30, wait=5.0)
    def settle(invoice_id: int, lease: Lease) -> str:
        return f"{invoice_id} {lease.token}"

    assert_type(settle(42), str)
    leases.holding("invoice:{invoice_id}", tll=30)  # type: ignore[call-arg]


# asyncio


async def later(lost: LeaseLost) -> None: ...


async def asynchronous(client: redis.asyncio.Redis, clock: FakeClock) -> int:
    leases = AsyncLeases(client, namespace="billing", ledger=AsyncMemoryLedger(), clock=clock)
    async with leases.acquire("invoice:42", ttl=30) as lease:
        assert_type(lease, AsyncLease)
        lease.check()
        await lease.renew()
        await lease.extend(60)
    held = await leases.acquire("invoice:43", wait=5, on_lost=later)
    assert_type(held, AsyncLease)
    await held.release()
    maybe = await leases.try_acquire("invoice:44", renewal=Renewal(on_failure="continue"))
    assert_type(maybe, AsyncLease | None)
    async with leases.acquire_all({"a", "b"}, label="both") as several:
        assert_type(several.token, int)
    assert_type(await leases.peek("invoice:42"), HeldBy | None)
    async with leases as same:
        assert_type(same, AsyncLeases)
    await leases.aclose()
    await clock.advance_async(5)
    assert_type(await supersede_async(held), AsyncLease)
    return held.token


async def asynchronous_mistakes(leases: AsyncLeases, client: redis.Redis) -> None:
    AsyncLeases(client)  # type: ignore[arg-type]
    AsyncLeases(MemoryBackend())  # type: ignore[arg-type]
    AsyncLeases(AsyncMemoryBackend(), ledger=MemoryLedger())  # type: ignore[arg-type]
    leases.acquire("a").token  # type: ignore[attr-defined]  # noqa: B018
    await leases.acquire("a", tll=5)  # type: ignore[call-arg]
    with leases.acquire("a"):  # type: ignore[attr-defined]
        pass
    (await leases.try_acquire("a")).token  # type: ignore[union-attr]  # noqa: B018
    leases.close()  # type: ignore[attr-defined]


async def decorated_async(leases: AsyncLeases) -> None:
    @leases.holding("invoice:{invoice_id}")
    async def settle(invoice_id: int, lease: AsyncLease) -> str:
        return f"{invoice_id} {lease.token}"

    assert_type(await settle(42), str)

    @leases.holding("a")  # type: ignore[arg-type]
    def plain() -> None: ...


def grants(leases: Iterable[Lease | AsyncLease]) -> list[Grant]:
    """A function that takes either: the token is all that it wants."""
    return [lease.grant for lease in leases]


# The SQL half


class Base(DeclarativeBase):
    pass


class Invoice(Fenced, Base):
    __tablename__ = "invoice"
    __fence_resource__ = "invoice:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


def guard(engine: Engine, lease: Lease, grant: Grant, maker: sessionmaker[Session]) -> None:
    install(engine)
    install(engine, unguarded="warn", observers=[observe])
    with Session(engine) as session, guarded(session, lease) as same:
        assert_type(same, Session)
        assert_type(session.get_one(Invoice, 42).fence_token, int)
        session.commit()
    with guarded(maker, grant) as made:
        assert_type(made, Session)
    with engine.connect() as connection, guarded(connection, lease) as itself:
        assert_type(itself, Connection)
    with using(lease), maker() as picked, unguarded(picked, reason="backfill"):
        picked.commit()
    table = Table("t", MetaData(), *fence_columns(token="t", holder="h", resource="r:{id}"))
    assert_type(fence(table, resource="r:{id}"), Table)
    sessionmaker(engine, class_=FencedSession)


def guard_mistakes(engine: Engine, session: Session, lease: Lease) -> None:
    install(engine, unguarded="ignore")  # type: ignore[arg-type]
    install(engine, "warn")  # type: ignore[call-arg]
    guarded(session, 42)  # type: ignore[call-overload]
    unguarded(session, "backfill")  # type: ignore[call-arg]
    unguarded(session)  # type: ignore[call-arg]


def repository(session: Session, lease: Lease) -> None:
    invoices = GuardedRepository(Invoice, session, lease)
    assert_type(invoices.get(42), Invoice | None)
    assert_type(invoices.add(Invoice(id=1, state="open")), Invoice)
    assert_type(invoices.update(42, state="paid"), Written)
    assert_type(invoices.upsert_many([{"id": 42, "state": "paid"}], key=["id"]), list[Written])
    if invoices.delete(42).outcome == "deleted":
        session.commit()
    invoices.add(42)  # type: ignore[arg-type]
    GuardedRepository(Invoice, lease, session)  # type: ignore[arg-type]


async def guard_async(
    engine: AsyncEngine, lease: AsyncLease, maker: async_sessionmaker[AsyncSession]
) -> None:
    install(engine)
    async with AsyncSession(engine) as session:
        with guarded(session, lease) as same:
            assert_type(same, AsyncSession)
        async with guarded(session, lease):
            await session.commit()
        invoices = AsyncGuardedRepository(Invoice, session, lease)
        assert_type(await invoices.get(42), Invoice | None)
        assert_type(await invoices.claim_many([1, 2]), list[Written])
    async with guarded(maker, lease) as made:
        assert_type(made, AsyncSession)


def refusals(session: Session) -> object:
    try:
        session.commit()
    except StaleToken as stale:
        assert_type(stale.table, str | None)
        assert_type(stale.stored_holder, str | None)
        return stale.identity
    except (UnguardedWrite, UnverifiableWrite) as refused:
        return refused.table
    except OutcomeUnknown as unknown:
        assert_type(unknown.token, int)
    except (RowMissing, WrongResource) as wrong:
        return wrong.resource
    return None
