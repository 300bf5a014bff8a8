"""What the tests of the SQL half share: grants of two holders, and a database seen from outside the guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import sqlalchemy as sa
from harness.sides import Recorder
from psycopg import sql
from sqlalchemy import Engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from fencing import Grant, Leases
from fencing.events import WriteUnguarded
from fencing.sql import Fenced, install
from fencing.testing import FakeClock, MemoryBackend
from fencing.token import new_holder


@contextlib.contextmanager
def own_database(postgres_url: str) -> Iterator[str]:
    """A database for the tests of a module, on the shared PostgreSQL."""
    url = make_url(postgres_url)
    name = f"test_{uuid4().hex}"
    administration = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with contextlib.closing(psycopg.connect(administration, autocommit=True)) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield url.set(database=name).render_as_string(hide_password=False)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def emptied(url: str) -> str:
    """The same database, as if it were new: whoever is still connected is shown the door."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with contextlib.closing(psycopg.connect(plain, autocommit=True)) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        for schema in ("area", "public"):
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    return url


def grant(token: int, *resources: str) -> Grant:
    """What a holder of its own has, with this token."""
    return Grant("billing", resources or ("invoice:1",), new_holder(), token, 0.0)


OLD, NEW = grant(10), grant(20)
"""Two holders, one after the other."""


class Base(DeclarativeBase): ...


class Invoice(Fenced, Base):
    __tablename__ = "scene_invoice"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str]


class Parcel(Fenced, Base):
    __tablename__ = "scene_parcel"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str]


class Note(Base):
    """A table without a fence."""

    __tablename__ = "scene_note"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    words: Mapped[str]


class Db:
    """A database with one invoice, one parcel and no notes, whose engine has the guard."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.told = Recorder()
        self.engine = sa.create_engine(url)
        install(self.engine, observers=[self.told.observe])
        self._outside = sa.create_engine(url, poolclass=NullPool)
        self._more: list[Engine] = []
        Base.metadata.create_all(self._outside)
        with self._outside.begin() as connection:
            connection.execute(sa.insert(Invoice.__table__), {"id": 1, "state": "open"})
            connection.execute(sa.insert(Parcel.__table__), {"id": 1, "state": "open"})

    @property
    def kind(self) -> str:
        return self.engine.dialect.name

    def another_engine(self, **options: Any) -> Engine:
        """An engine of the same database, without the guard."""
        self._more.append(sa.create_engine(self.url, **options))
        return self._more[-1]

    def async_url(self) -> str:
        names = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}
        return make_url(self.url).set(drivername=names[self.kind]).render_as_string(hide_password=False)

    def outside(self, statement: Any, parameters: Any = None) -> list[Any]:
        """Do something as a client that has never heard of fencing."""
        with self._outside.begin() as connection:
            result = connection.execute(statement, parameters)
            return list(result) if result.returns_rows else []

    def invoice(self, model: Any = Invoice) -> tuple[str, int] | None:
        """The state and the token of row 1, if it is there."""
        table = model.__table__
        rows = self.outside(sa.select(table.c.state, table.c.fence_token).where(table.c.id == 1))
        return tuple(rows[0]) if rows else None

    def notes(self) -> list[int]:
        return [row.id for row in self.outside(sa.select(Note.__table__).order_by(Note.id))]

    def overtake(self, by: Grant = NEW, state: str = "newer", model: Any = Invoice) -> None:
        """The next holder writes row 1."""
        newer = {"state": state, "fence_token": by.token, "fence_holder": UUID(by.holder)}
        self.outside(sa.update(model.__table__).where(model.__table__.c.id == 1).values(newer))

    def unguarded(self) -> list[WriteUnguarded]:
        return self.told.of(WriteUnguarded)

    def close(self) -> None:
        for engine in (self.engine, self._outside, *self._more):
            engine.dispose()


class AsyncDb:
    """An async engine of the same database, with the guard."""

    def __init__(self, db: Db) -> None:
        self.engine: AsyncEngine = create_async_engine(db.async_url())
        install(self.engine, observers=[db.told.observe])

    async def __aenter__(self) -> AsyncEngine:
        return self.engine

    async def __aexit__(self, *_: object) -> None:
        await self.engine.dispose()


def do(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a test's coroutine."""
    return asyncio.run(work())


class FakeLeases:
    """Leases in memory on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.backend = MemoryBackend(self.clock)
        self.told = Recorder()
        self.leases = Leases(self.backend, namespace="billing", observers=[self.told.observe])


@contextlib.contextmanager
def sent(engine: Engine) -> Iterator[list[str]]:
    """The statements of the engine that the database has carried out inside the block, but for BEGIN."""
    statements: list[str] = []

    def record(connection, cursor, statement, parameters, context, many) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    event.listen(engine, "after_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(engine, "after_cursor_execute", record)
