"""A database behind each driver: the guarded engine under test, and an administrator who sets and sees all rows."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from harness.mariadb import empty_database
from psycopg import sql
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencing.sql import guarded, install
from fencing.token import Grant
from guard_kit.models import AREA, FENCES, Base, World

Dialect = Literal["postgresql", "sqlite", "mariadb"]

TABLES = dict(Base.metadata.tables)
OCCUPIED = sa.union_all(
    *(
        sa.select(sa.literal(name), sa.exists(sa.select(sa.literal(1)).select_from(table)))
        for name, table in TABLES.items()
    )
)


class Driver(NamedTuple):
    name: str
    dialect: Dialect
    url: str
    is_async: bool


DRIVERS = {
    driver.name: driver
    for driver in (
        Driver("psycopg", "postgresql", "postgresql+psycopg", False),
        Driver("psycopg_async", "postgresql", "postgresql+psycopg_async", True),
        Driver("asyncpg", "postgresql", "postgresql+asyncpg", True),
        Driver("pysqlite", "sqlite", "sqlite+pysqlite", False),
        Driver("aiosqlite", "sqlite", "sqlite+aiosqlite", True),
        Driver("pymysql", "mariadb", "mysql+pymysql", False),
    )
}
SERVERS = {"postgresql": "postgres_url", "mariadb": "mariadb_url"}
"""The fixtures that say where a server is."""

ADMINISTRATORS = {
    "postgresql": "postgresql+psycopg",
    "sqlite": "sqlite+pysqlite",
    "mariadb": "mysql+pymysql",
}
UNFETTERED: dict[str, dict[str, Any]] = {
    "postgresql": {"options": "-c session_replication_role=replica -c synchronous_commit=off"},
    "sqlite": {},
    "mariadb": {"init_command": "SET foreign_key_checks = 0"},
}
"""The administrator seeds and wipes in any order: no foreign key is looked at."""


class Stamp(NamedTuple):
    """What a fence says."""

    token: int
    holder: str


Key = tuple[Any, ...]
Snapshot = dict[str, dict[Key, dict[str, Any]]]
"""Every row of every table, by the table's name and the row's primary key."""

Write = Callable[[Session], object]


class Database:
    """One database, and its rows as they are outside of any guard."""

    def __init__(self, driver: Driver, url: sa.URL, area: str, runner: asyncio.Runner) -> None:
        self.driver = driver
        self.dialect = driver.dialect
        self.area = area
        self._runner = runner
        url = url.set(drivername=driver.url)
        self._async_engine = create_async_engine(url) if driver.is_async else None
        self.engine = self._async_engine.sync_engine if self._async_engine else sa.create_engine(url)
        self._admin = sa.create_engine(
            url.set(drivername=ADMINISTRATORS[driver.dialect]),
            isolation_level="AUTOCOMMIT",
            connect_args=UNFETTERED[driver.dialect],
            execution_options={"schema_translate_map": self.schemas},
        )
        if driver.dialect == "sqlite":
            for engine in (self.engine, self._admin):
                event.listen(engine, "connect", self._attach)
        install(self.engine)

    @property
    def schemas(self) -> dict[str, str]:
        return {AREA: self.area}

    def create(self) -> None:
        with self._admin.connect() as connection:
            if self.dialect == "postgresql":
                connection.execute(sa.schema.CreateSchema(self.area))
            Base.metadata.create_all(connection)

    def dispose(self) -> None:
        if self._async_engine is not None:
            self._runner.run(self._async_engine.dispose())
        else:
            self.engine.dispose()
        self._admin.dispose()

    def _attach(self, connection: Any, _: object) -> None:
        cursor = connection.cursor()
        for pragma in ("synchronous = OFF", "journal_mode = MEMORY", "busy_timeout = 100"):
            cursor.execute(f"PRAGMA {pragma}")
        file = Path(self.engine.url.database or "").with_name(f"{self.area}.db")
        cursor.execute(f"ATTACH DATABASE '{file}' AS {self.area}")
        cursor.close()

    # What the tests do with it

    def run(self, work: Write, grant: Grant | None = None) -> None:
        """Do the work in a session of its own, guarded by the grant if there is one."""
        if self._async_engine is not None:
            self._runner.run(self._run_async(work, grant))
            return
        with forgetting(), Session(self.engine, info={"schemas": self.schemas}) as session:
            with guarded(session, grant) if grant else contextlib.nullcontext():
                work(session)

    async def _run_async(self, work: Write, grant: Grant | None) -> None:
        async with AsyncSession(self._async_engine, info={"schemas": self.schemas}) as session:
            with guarded(session, grant) if grant else contextlib.nullcontext():
                await session.run_sync(work)

    def run_plainly(self, work: Write) -> None:
        """Do the work without the guard's hooks: what it does by itself."""
        with Session(self._admin, info={"schemas": self.schemas}) as session:
            work(session)

    def seed(self, world: World, stamp: Callable[[str, Key], Stamp]) -> Snapshot:
        """Exactly these rows, each with the fence that `stamp` says for its table and key."""
        snapshot: Snapshot = {name: {} for name in TABLES}
        with self._admin.connect() as connection:
            for name in self._occupied(connection):
                connection.execute(TABLES[name].delete())
            for table, rows in world.items():
                stamped = [_stamped(table, row, stamp) for row in rows]
                connection.execute(table.insert(), stamped)
                snapshot[table.fullname] = {key_of(table, row): row for row in stamped}
        return snapshot

    def snapshot(self) -> Snapshot:
        """What is there now, read without the guard."""
        snapshot: Snapshot = {name: {} for name in TABLES}
        with self._admin.connect() as connection:
            for name in self._occupied(connection):
                table = TABLES[name]
                rows = connection.execute(sa.select(table)).mappings()
                snapshot[name] = {key_of(table, row): dict(row) for row in rows}
        return snapshot

    def _occupied(self, connection: sa.Connection) -> list[str]:
        """The tables that have rows: to ask once is quicker than to read twenty empty ones."""
        return [name for name, there in connection.execute(OCCUPIED) if there]


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Let go of what an error's frames hold: with SQLite an open cursor is a lock, and would fail the next test."""
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


def key_of(table: sa.Table, row: Any) -> Key:
    return tuple(row[column.name] for column in table.primary_key.columns)


def fence_in(table: str, row: dict[str, Any]) -> Stamp:
    """The fence of a row of a snapshot."""
    token, holder = FENCES[table]
    return Stamp(row[token], row[holder].hex)


def _stamped(table: sa.Table, row: dict[str, Any], stamp: Callable[[str, Key], Stamp]) -> dict[str, Any]:
    name = table.fullname
    if name not in FENCES:
        return row
    said = stamp(name, key_of(table, row))
    token, holder = FENCES[name]
    return {**row, token: said.token, holder: UUID(said.holder)}


class Databases:
    """The databases of one worker: each is made when it is first asked for, and dropped in the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[str, Database] = {}
        self._close = contextlib.ExitStack()

    def __enter__(self) -> Databases:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def get(self, name: str, request: pytest.FixtureRequest) -> Database:
        if name not in self._made:
            driver = DRIVERS[name]
            server = SERVERS.get(driver.dialect)
            self._made[name] = self._make(driver, request.getfixturevalue(server) if server else "")
        return self._made[name]

    def _make(self, driver: Driver, url: str) -> Database:
        with contextlib.ExitStack() as stack:
            match driver.dialect:
                case "postgresql":
                    place, area = stack.enter_context(empty_postgres(url)), "elsewhere"
                case "mariadb":
                    place = stack.enter_context(empty_database(url))
                    area = str(sa.make_url(stack.enter_context(empty_database(url))).database)
                case "sqlite":
                    place, area = f"sqlite:///{self._directory / driver.name}.db", f"elsewhere_{driver.name}"
            runner = stack.enter_context(asyncio.Runner())
            database = Database(driver, sa.make_url(place), area, runner)
            stack.callback(database.dispose)
            database.create()
            self._close.enter_context(stack.pop_all())
        return database


@contextlib.contextmanager
def empty_postgres(url: str) -> Iterator[str]:
    """The url of a new database on the server at `url`, dropped in the end whoever still uses it."""
    name = f"test_{uuid.uuid4().hex}"
    administration = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with contextlib.closing(psycopg.connect(administration, autocommit=True)) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield sa.make_url(url).set(database=name).render_as_string(hide_password=False)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
