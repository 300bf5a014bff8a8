"""What the guard costs: a flush and commit, guarded and plain, on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from benchmarks.measuring import compare, compare_async, costs, pin, unpin
from fencing import Leases
from fencing.embedded import PostgresServer
from fencing.lease import Lease
from fencing.sql import Fenced, guarded, install
from fencing.testing import MemoryBackend

ROWS = 1000


class Base(orm.DeclarativeBase):
    pass


class Plain(Base):
    __tablename__ = "plain"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]
    value: orm.Mapped[int]


class Guarded(Fenced, Base):
    __tablename__ = "guarded"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]
    value: orm.Mapped[int]


class Versioned(Base):
    __tablename__ = "versioned"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]
    value: orm.Mapped[int]
    version: orm.Mapped[int] = orm.mapped_column(nullable=False)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


def run() -> None:
    for durable in ("on", "off"):
        with PostgresServer(settings={"synchronous_commit": durable, "autovacuum": "off"}) as server:
            assert server.pid is not None
            where = pin(server.pid)  # before anybody connects: a connection has a process of its own
            print(f"\n## The guard, PostgreSQL with synchronous_commit={durable} ({where})")
            measure(server)
            unpin(server.pid)


def measure(server: PostgresServer) -> None:
    plain, idle = sa.create_engine(server.url), sa.create_engine(server.url)
    install(idle)
    Base.metadata.create_all(plain)
    with plain.begin() as connection:
        for model in (Plain, Guarded, Versioned):
            rows = [{"id": n, "name": f"row {n}", "value": 0} for n in range(1, ROWS + 1)]
            extra = {"version": 1} if model is Versioned else {}
            connection.execute(sa.insert(model.__table__), [{**row, **extra} for row in rows])
    leases = Leases(MemoryBackend(), namespace="bench", observers=[])
    with leases.acquire("all") as lease:
        single(plain, idle, lease)
        for count, cycles in ((1, 60), (100, 8), (ROWS, 1)):
            batch(plain, idle, lease, count, cycles)
        bulk(plain, idle, lease)
        asyncio.run(asynchronous(server, lease))
    plain.dispose()
    idle.dispose()


def single(plain: sa.Engine, idle: sa.Engine, lease: Lease) -> None:
    """One transaction: a new session, read, change, commit."""

    def once(engine: sa.Engine, model: Any, guard: Lease | None) -> Callable[[], None]:
        def work() -> None:
            with orm.Session(engine) as session:
                if guard is None:
                    session.get(model, 1).value += 1
                    session.commit()
                else:
                    with guarded(session, guard):
                        session.get(model, 1).value += 1
                        session.commit()

        return work

    show("1 row: session, get, change, commit", plain, idle, lease, once, 60)


def batch(plain: sa.Engine, idle: sa.Engine, lease: Lease, count: int, cycles: int) -> None:
    """Rows that are loaded already, all changed, then flush and commit."""

    def changes(engine: sa.Engine, model: Any, guard: Lease | None) -> Callable[[], None]:
        session = orm.Session(engine, expire_on_commit=False)
        if guard is not None:
            guarded(session, guard).__enter__()
        rows = list(session.scalars(sa.select(model).where(model.id <= count)))
        session.commit()

        def work() -> None:
            for row in rows:
                row.value += 1
            session.commit()

        return work

    rows = "1 dirty row" if count == 1 else f"{count} dirty rows"
    show(f"{rows}: flush and commit", plain, idle, lease, changes, cycles)


def bulk(plain: sa.Engine, idle: sa.Engine, lease: Lease) -> None:
    """``execute(update(Model), [...])``, and commit."""

    def many(engine: sa.Engine, model: Any, guard: Lease | None) -> Callable[[], None]:
        session = orm.Session(engine)
        if guard is not None:
            guarded(session, guard).__enter__()
        rows = [{"id": n, "value": n} for n in range(1, ROWS + 1)]

        def work() -> None:
            session.execute(sa.update(model), rows, execution_options={"synchronize_session": None})
            session.commit()

        return work

    show(f"bulk update of {ROWS} by key, and commit", plain, idle, lease, many, 1, versioned=False)


def show(
    title: str,
    plain: sa.Engine,
    idle: sa.Engine,
    lease: Lease,
    make: Callable[..., Callable[[], None]],
    cycles: int,
    *,
    versioned: bool = True,
) -> None:
    variants = {
        "plain": make(plain, Plain, None),
        "plain (A/A)": make(plain, Plain, None),
        "guard installed, no lease": make(idle, Plain, None),
        "guarded": make(idle, Guarded, lease),
    }
    if versioned:
        variants["version_id_col"] = make(plain, Versioned, None)
    for call in variants.values():
        call()
    costs(title, compare(variants, cycles), "plain")


async def asynchronous(server: PostgresServer, lease: Lease) -> None:
    """asyncpg cannot count batches: one read verifies them."""
    url = sa.make_url(server.url).set(drivername="postgresql+asyncpg")
    engine = create_async_engine(url)
    install(engine)

    async def changes(model: Any, count: int, guard: Lease | None) -> Callable[[], Awaitable[None]]:
        session = AsyncSession(engine, expire_on_commit=False)
        if guard is not None:
            guarded(session, guard).__enter__()
        rows = list(await session.scalars(sa.select(model).where(model.id <= count)))
        await session.commit()

        async def work() -> None:
            for row in rows:
                row.value += 1
            await session.commit()

        return work

    for count, cycles in ((1, 60), (100, 8)):
        variants = {
            "plain": await changes(Plain, count, None),
            "plain (A/A)": await changes(Plain, count, None),
            "guarded": await changes(Guarded, count, lease),
        }
        for call in variants.values():
            await call()
        costs(
            f"asyncpg, {count} dirty row{'s' if count > 1 else ''}: flush and commit",
            await compare_async(variants, cycles),
            "plain",
        )
    await engine.dispose()
