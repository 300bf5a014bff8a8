"""A stale write that meets an uncommitted newer one, at every isolation level of PostgreSQL and on MariaDB."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fencing import Grant, StaleToken
from fencing.embedded.processes import wait_until
from fencing.sql import Fenced, commit, guarded, install

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
LIMIT = 10.0


class Base(orm.DeclarativeBase):
    pass


class Row(Fenced, Base):
    __tablename__ = "concurrent"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    value: orm.Mapped[int]


def grant(token: int, holder: str = "a") -> Grant:
    return Grant("test", ("row",), holder * 32, token, 0.0)


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(Row.__table__), [{"id": 1, "value": 0}, {"id": 2, "value": 0}])
    install(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def other_thread() -> Iterator[Callable[..., Future[None]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def stored(engine: sa.Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        row = connection.execute(sa.select(Row.value, Row.fence_token).filter_by(id=1)).one()
    return row.value, row.fence_token


def waits_for_a_lock(engine: sa.Engine) -> bool:
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with engine.connect() as connection:
        return bool(connection.execute(query).scalar_one())


def at(engine: sa.Engine, level: str) -> sa.Engine:
    return engine.execution_options(isolation_level=level)


def behind(engine: sa.Engine, level: str, mine: Grant, write: Callable[[orm.Session], None]) -> None:
    """Read first, so that a snapshot is taken; then write, which waits."""
    with orm.Session(at(engine, level)) as session, guarded(session, mine):
        session.scalars(sa.select(Row)).all()
        snapshot.set()
        assert go.wait(LIMIT)
        write(session)
        session.commit()


snapshot = threading.Event()
go = threading.Event()


@pytest.fixture(autouse=True)
def _fresh_events() -> None:
    snapshot.clear()
    go.clear()


def flush(session: orm.Session) -> None:
    session.get_one(Row, 1).value = 33


def delete(session: orm.Session) -> None:
    session.delete(session.get_one(Row, 1))


def criteria(session: orm.Session) -> None:
    session.execute(sa.update(Row).where(Row.value >= 0).values(value=33))


@pytest.mark.parametrize("write", [flush, delete, criteria], ids=lambda write: write.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_stale_write_behind_an_uncommitted_newer_one_is_refused(
    engine: sa.Engine, other_thread: Callable[..., Future[None]], level: str, write: Callable[..., None]
) -> None:
    stale = other_thread(behind, engine, level, grant(33), write)
    assert snapshot.wait(LIMIT)
    with orm.Session(engine) as session, guarded(session, grant(34, "b")):
        session.get_one(Row, 1).value = 34
        session.flush()
        go.set()
        assert wait_until(lambda: stale.done() or waits_for_a_lock(engine), LIMIT)
        assert not stale.done()
        session.commit()
    with pytest.raises(StaleToken) as refused:
        stale.result(LIMIT)
    assert (refused.value.stored_token, refused.value.stored_holder) == (34, "b" * 32)
    assert (refused.value.table, refused.value.identity) == ("concurrent", (1,))
    assert stored(engine) == (34, 34)


@pytest.mark.parametrize("level", LEVELS)
def test_write_behind_a_newer_one_that_is_rolled_back_is_admitted(
    engine: sa.Engine, other_thread: Callable[..., Future[None]], level: str
) -> None:
    mine = other_thread(behind, engine, level, grant(33), flush)
    assert snapshot.wait(LIMIT)
    with orm.Session(engine) as session, guarded(session, grant(34, "b")):
        session.get_one(Row, 1).value = 34
        session.flush()
        go.set()
        assert wait_until(lambda: waits_for_a_lock(engine), LIMIT)
        session.rollback()
    mine.result(LIMIT)
    assert stored(engine) == (33, 33)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_ordinary_serialization_failure_is_not_called_stale(
    engine: sa.Engine, other_thread: Callable[..., Future[None]], level: str
) -> None:
    """Two transactions of one lease: the second has lost a race, not its lease. Trying again helps."""
    second = other_thread(behind, engine, level, grant(33), flush)
    assert snapshot.wait(LIMIT)
    with orm.Session(engine) as session, guarded(session, grant(33)):
        session.get_one(Row, 1).value = 1
        session.commit()
    go.set()
    with pytest.raises(DBAPIError) as failure:
        second.result(LIMIT)
    assert failure.value.orig is not None
    assert commit.state_of(failure.value.orig) == "40001"
    assert stored(engine) == (1, 33)
    with orm.Session(at(engine, level)) as session, guarded(session, grant(33)):
        flush(session)
        session.commit()
    assert stored(engine) == (33, 33)


def test_without_the_look_behind_it_a_serialization_failure_hides_the_stale_token(
    engine: sa.Engine, other_thread: Callable[..., Future[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_hidden", lambda context, guard: None)
    stale = other_thread(behind, engine, "REPEATABLE READ", grant(33), flush)
    assert snapshot.wait(LIMIT)
    with orm.Session(engine) as session, guarded(session, grant(34, "b")):
        session.get_one(Row, 1).value = 34
        session.commit()
    go.set()
    with pytest.raises(DBAPIError):
        stale.result(LIMIT)
    assert stored(engine) == (34, 34)


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg"])
@pytest.mark.parametrize("level", LEVELS)
def test_stale_write_is_refused_behind_a_newer_one_under_asyncio(
    engine: sa.Engine, database_url: str, driver: str, level: str
) -> None:
    async def main() -> StaleToken:
        asynchronous = create_async_engine(sa.make_url(database_url).set(drivername=driver))
        install(asynchronous)
        try:
            return await stale_task(asynchronous)
        finally:
            await asynchronous.dispose()

    async def stale_task(asynchronous) -> StaleToken:
        ready, proceed = asyncio.Event(), asyncio.Event()

        async def stale() -> None:
            clone = asynchronous.execution_options(isolation_level=level)
            async with AsyncSession(clone) as session, guarded(session, grant(33)):
                row = await session.get_one(Row, 1)
                ready.set()
                await proceed.wait()
                row.value = 33
                await session.commit()

        task = asyncio.create_task(stale())
        await asyncio.wait_for(ready.wait(), LIMIT)
        async with AsyncSession(asynchronous) as session, guarded(session, grant(34, "b")):
            (await session.get_one(Row, 1)).value = 34
            await session.flush()
            proceed.set()
            blocked = asyncio.to_thread(wait_until, lambda: waits_for_a_lock(engine), LIMIT)
            assert await blocked
            await session.commit()
        with pytest.raises(StaleToken) as refused:
            await task
        return refused.value

    error = asyncio.run(main())
    assert (error.stored_token, error.identity) == (34, (1,))
    assert stored(engine) == (34, 34)


def test_stale_write_behind_a_newer_one_is_refused_on_mariadb(
    mariadb_database_url: str, other_thread: Callable[..., Future[None]]
) -> None:
    """At REPEATABLE READ a plain read would still show the old row after the wait: the verdict locks."""
    engine = sa.create_engine(mariadb_database_url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(Row.__table__), [{"id": 1, "value": 0}, {"id": 2, "value": 0}])
    install(engine)
    query = sa.text("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")

    def waits() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(query).scalar_one())

    try:
        stale = other_thread(behind, engine, "REPEATABLE READ", grant(33), flush)
        assert snapshot.wait(LIMIT)
        with orm.Session(engine) as session, guarded(session, grant(34, "b")):
            session.get_one(Row, 1).value = 34
            session.flush()
            go.set()
            assert wait_until(waits, LIMIT)
            session.commit()
        with pytest.raises(StaleToken) as refused:
            stale.result(LIMIT)
        assert refused.value.stored_token == 34
        assert stored(engine) == (34, 34)
    finally:
        engine.dispose()
