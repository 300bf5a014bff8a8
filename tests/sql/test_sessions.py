"""The rules of `guarded`, `unguarded`, `using` and `install`: when a guard is in force, and what it holds up."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sql.scene import (
    NEW,
    OLD,
    AsyncDb,
    Db,
    FakeLeases,
    Invoice,
    Note,
    Parcel,
    do,
    emptied,
    grant,
    own_database,
    sent,
)
from sqlalchemy import Engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    relationship,
    scoped_session,
    sessionmaker,
    undefer,
)
from sqlalchemy.orm.exc import StaleDataError

from fencing import (
    ConfigurationError,
    LeaseLost,
    LeaseNotHeld,
    OutcomeUnknown,
    StaleToken,
    UnguardedWrite,
    UnverifiableWrite,
)
from fencing.events import CommitUnknown, WriteAdmitted, WriteRefused
from fencing.sql import FencedSession, fence, guarded, install, unguarded, using

INVOICE = Invoice.__table__
PAY = sa.update(INVOICE).where(INVOICE.c.id == 1).values(state="paid")


@pytest.fixture(scope="module")
def own_url(postgres_url: str) -> Iterator[str]:
    with own_database(postgres_url) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest) -> Iterator[Db]:
    """Where a rule might depend on the database."""
    yield from opened(request, request.param)


@pytest.fixture
def lite(request: pytest.FixtureRequest) -> Iterator[Db]:
    """Where it cannot."""
    yield from opened(request, "sqlite")


@pytest.fixture
def pg(request: pytest.FixtureRequest) -> Iterator[Db]:
    yield from opened(request, "postgresql")


def opened(request: pytest.FixtureRequest, kind: str) -> Iterator[Db]:
    if kind == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path')}/guarded.db"
    else:
        url = emptied(request.getfixturevalue("own_url"))
    db = Db(url)
    yield db
    db.close()


@pytest.fixture
def leases() -> FakeLeases:
    return FakeLeases()


# The beginning


def test_a_fresh_write_is_admitted_and_stamps_the_row(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD) as same:
        assert same is session
        session.get(Invoice, 1).state = "paid"
        session.commit()
    assert db.invoice() == ("paid", OLD.token)


def test_a_stale_write_is_refused_and_leaves_the_row_alone(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        session.get(Invoice, 1).state = "paid"
        with pytest.raises(StaleToken) as refused:
            session.commit()
    error = refused.value
    assert (error.table, error.identity, error.resource) == (INVOICE.name, (1,), "invoice:1")
    assert (error.token, error.holder) == (OLD.token, OLD.holder)
    assert (error.stored_token, error.stored_holder) == (NEW.token, NEW.holder)
    assert db.invoice() == ("newer", NEW.token)


def test_the_same_token_of_another_holder_is_refused(db: Db) -> None:
    db.overtake(grant(OLD.token))
    with Session(db.engine) as session, guarded(session, OLD):
        with pytest.raises(StaleToken, match="the same token, of another holder"):
            session.execute(PAY)
    assert db.invoice() == ("newer", OLD.token)


def test_a_stale_delete_by_the_unit_of_work_is_refused(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        session.delete(session.get(Invoice, 1))
        with pytest.raises(StaleToken):
            session.commit()
    assert db.invoice() == ("newer", NEW.token)


def test_a_session_that_has_read_is_refused(db: Db) -> None:
    with Session(db.engine) as session:
        session.get(Invoice, 1)
        with pytest.raises(ConfigurationError, match="talked to the database already"):
            guarded(session, OLD).__enter__()
        session.rollback()
        with guarded(session, OLD):
            session.execute(PAY)
            session.commit()
    assert db.invoice() == ("paid", OLD.token)


def test_a_session_that_has_read_inside_a_savepoint_is_refused(db: Db) -> None:
    with Session(db.engine) as session, session.begin(), session.begin_nested():
        session.get(Invoice, 1)
        with pytest.raises(ConfigurationError, match="talked to the database already"):
            guarded(session, OLD).__enter__()


def test_a_connection_that_has_read_is_refused(db: Db) -> None:
    with db.engine.begin() as connection:
        connection.execute(sa.select(INVOICE))
        with pytest.raises(ConfigurationError, match="talked to the database already"):
            guarded(connection, OLD).__enter__()


def test_a_connection_whose_talk_nobody_watched_is_refused(lite: Db) -> None:
    with lite.another_engine().begin() as connection:
        with pytest.raises(ConfigurationError, match=r"call install\(engine\)"):
            guarded(connection, OLD).__enter__()


def test_a_connection_that_has_read_while_nobody_watched_is_refused(db: Db) -> None:
    with db.another_engine().begin() as connection:
        connection.execute(sa.select(INVOICE))
        with pytest.raises(ConfigurationError, match="talked to the database already"):
            guarded(connection, OLD).__enter__()


def test_a_connection_may_be_used_again_when_what_it_read_is_over(db: Db) -> None:
    with db.engine.connect() as connection:
        connection.execute(sa.select(INVOICE))
        connection.rollback()
        with guarded(connection, OLD):
            connection.execute(PAY)
            connection.commit()
    assert db.invoice() == ("paid", OLD.token)


def add(session: Session) -> None:
    session.add(Invoice(id=2, state="new"))


def change(session: Session) -> None:
    next(iter(session.identity_map.values())).state = "changed"


def remove(session: Session) -> None:
    session.delete(next(iter(session.identity_map.values())))


@pytest.mark.parametrize("pending", [add, change, remove])
def test_a_session_with_pending_changes_is_refused(lite: Db, pending: Callable[[Session], None]) -> None:
    with Session(lite.engine, expire_on_commit=False) as session:
        kept = session.get(Invoice, 1)
        session.commit()
        pending(session)
        with pytest.raises(ConfigurationError, match="pending changes"):
            guarded(session, OLD).__enter__()
        assert kept.id == 1
    assert lite.invoice() == ("open", 0)


def test_a_transaction_that_has_not_talked_is_accepted(db: Db) -> None:
    with sessionmaker(db.engine).begin() as session, guarded(session, OLD):
        session.get(Invoice, 1).state = "paid"
    assert db.invoice() == ("paid", OLD.token)


def test_what_was_loaded_before_the_lease_is_read_again(lite: Db) -> None:
    with Session(lite.engine, expire_on_commit=False) as session:
        invoice = session.get(Invoice, 1)
        session.commit()
        lite.outside(sa.update(INVOICE).values(state="changed meanwhile"))
        assert invoice.state == "open"
        session.rollback()
        with guarded(session, OLD):
            assert invoice.state == "changed meanwhile"


def test_a_lease_that_is_over_is_refused_at_once(lite: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    leases.clock.pause(31)
    with Session(lite.engine) as session:
        with pytest.raises(LeaseLost):
            guarded(session, lease).__enter__()


@pytest.mark.parametrize("wrong", [None, "invoice:1", 42, Invoice])
def test_what_is_no_lease_is_refused(lite: Db, wrong: Any) -> None:
    with Session(lite.engine) as session:
        with pytest.raises(ConfigurationError, match="takes a lease"):
            guarded(session, wrong)
    with pytest.raises(ConfigurationError, match="takes a lease"):
        using(wrong).__enter__()


@pytest.mark.parametrize("wrong", [None, "a session", Invoice])
def test_what_is_no_session_is_refused(lite: Db, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes a Session"):
        guarded(wrong, OLD).__enter__()
    with pytest.raises(ConfigurationError, match="takes a Session"):
        guarded(lite.engine, OLD).__enter__()


# What can be guarded


def test_a_connection(db: Db) -> None:
    with db.engine.connect() as connection, guarded(connection, OLD) as same:
        assert same is connection
        connection.execute(PAY)
        connection.commit()
        db.overtake()
        with pytest.raises(StaleToken):
            connection.execute(PAY)
    assert db.invoice() == ("newer", NEW.token)


def test_a_connection_of_engine_begin(db: Db) -> None:
    with db.engine.begin() as connection, guarded(connection, OLD):
        connection.execute(PAY)
    assert db.invoice() == ("paid", OLD.token)


def test_a_connection_goes_back_to_the_pool_without_its_guard(db: Db) -> None:
    with db.engine.begin() as connection, guarded(connection, OLD):
        connection.execute(PAY)
    with db.engine.begin() as connection:
        with pytest.raises(UnguardedWrite):
            connection.execute(PAY)


def test_a_scoped_session(lite: Db) -> None:
    sessions = scoped_session(sessionmaker(lite.engine))
    with guarded(sessions, OLD) as session:
        assert session is sessions()
        sessions.get(Invoice, 1).state = "paid"
        sessions.commit()
    sessions.remove()
    assert lite.invoice() == ("paid", OLD.token)


def test_a_sessionmaker_is_asked_for_a_session_that_is_closed_at_the_end(lite: Db) -> None:
    with guarded(sessionmaker(lite.engine), OLD) as session:
        session.execute(PAY)
        session.commit()
        session.execute(sa.update(INVOICE).values(state="not committed"))
    assert not session.in_transaction()
    assert lite.engine.pool.checkedout() == 0
    assert lite.invoice() == ("paid", OLD.token)


def test_a_sessionmakers_session_is_closed_when_the_guard_is_refused(lite: Db, leases: FakeLeases) -> None:
    made: list[Session] = []

    class Kept(Session):
        def close(self) -> None:
            made.append(self)
            super().close()

    lease = leases.leases.acquire("invoice:1", ttl=30)
    leases.clock.pause(31)
    with pytest.raises(LeaseLost):
        guarded(sessionmaker(lite.engine, class_=Kept), lease).__enter__()
    assert len(made) == 1


def test_an_async_session_by_with(db: Db) -> None:
    async def work() -> None:
        async with AsyncDb(db) as engine, AsyncSession(engine) as session:
            with guarded(session, OLD) as same:
                assert same is session
                (await session.get(Invoice, 1)).state = "paid"
                await session.commit()
                db.overtake()
                with pytest.raises(StaleToken):
                    await session.execute(PAY)

    do(work)
    assert db.invoice() == ("newer", NEW.token)


def test_an_async_session_by_async_with(db: Db) -> None:
    async def work() -> None:
        async with AsyncDb(db) as engine, AsyncSession(engine) as session, guarded(session, OLD) as same:
            assert same is session
            await session.execute(PAY)
            await session.commit()

    do(work)
    assert db.invoice() == ("paid", OLD.token)


def test_an_async_connection(db: Db) -> None:
    async def work() -> None:
        async with AsyncDb(db) as engine:
            async with engine.begin() as connection, guarded(connection, OLD):
                await connection.execute(PAY)
            async with engine.connect() as connection:
                with guarded(connection, OLD):
                    await connection.execute(PAY.values(state="twice"))
                    await connection.commit()

    do(work)
    assert db.invoice() == ("twice", OLD.token)


def test_an_async_connection_that_is_not_started_is_refused(lite: Db) -> None:
    async def work() -> None:
        async with AsyncDb(lite) as engine:
            with pytest.raises(ConfigurationError, match="await it first"):
                guarded(engine.connect(), OLD).__enter__()

    do(work)


def test_an_async_sessionmaker(lite: Db) -> None:
    async def work() -> None:
        async with AsyncDb(lite) as engine:
            sessions = async_sessionmaker(engine)
            async with guarded(sessions, OLD) as session:
                await session.execute(PAY)
                await session.commit()
            assert not session.in_transaction()
            with pytest.raises(ConfigurationError, match="async with"):
                guarded(sessions, OLD).__enter__()

    do(work)
    assert lite.invoice() == ("paid", OLD.token)


def test_an_async_scoped_session(lite: Db) -> None:
    async def work() -> None:
        async with AsyncDb(lite) as engine:
            sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
            async with guarded(sessions, OLD) as session:
                assert session is sessions()
                await sessions.execute(PAY)
                await sessions.commit()
            await sessions.remove()

    do(work)
    assert lite.invoice() == ("paid", OLD.token)


def test_run_sync_is_guarded_too(lite: Db) -> None:
    def in_the_background(session: Session, state: str) -> None:
        session.get(Invoice, 1).state = state
        session.flush()

    async def work() -> None:
        async with AsyncDb(lite) as engine, AsyncSession(engine) as session, guarded(session, OLD):
            await session.run_sync(in_the_background, "paid")
            await session.commit()
            lite.overtake()
            with pytest.raises(StaleToken):
                await session.run_sync(in_the_background, "again")

    do(work)
    assert lite.invoice() == ("newer", NEW.token)


def test_a_guard_inside_run_sync(lite: Db) -> None:
    def pay(session: Session) -> None:
        with guarded(session, OLD):
            session.execute(PAY)
            session.commit()

    async def work() -> None:
        async with AsyncDb(lite) as engine, AsyncSession(engine) as session:
            await session.run_sync(pay)

    do(work)
    assert lite.invoice() == ("paid", OLD.token)


# Several databases in one session


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Db, Db]]:
    """A database for invoices and one for parcels."""
    invoices, parcels = Db(f"sqlite:///{tmp_path}/invoices.db"), Db(f"sqlite:///{tmp_path}/parcels.db")
    yield invoices, parcels
    invoices.close()
    parcels.close()


def over_both(two: tuple[Db, Db]) -> Session:
    return Session(binds={Invoice: two[0].engine, Parcel: two[1].engine})


def test_both_databases_are_written_under_the_guard(two: tuple[Db, Db]) -> None:
    with over_both(two) as session, guarded(session, OLD):
        session.get(Invoice, 1).state = session.get(Parcel, 1).state = "both"
        session.commit()
    assert two[0].invoice() == two[1].invoice(Parcel) == ("both", OLD.token)


@pytest.mark.parametrize("stale", [Invoice, Parcel])
def test_stale_in_one_database_commits_in_neither(two: tuple[Db, Db], stale: type) -> None:
    two[0 if stale is Invoice else 1].overtake(model=stale)
    with over_both(two) as session, guarded(session, OLD):
        invoice, parcel = session.get(Invoice, 1), session.get(Parcel, 1)
        invoice.state = parcel.state = "both"
        with pytest.raises(StaleToken):
            session.commit()
    assert {two[0].invoice(), two[1].invoice(Parcel)} == {("newer", NEW.token), ("open", 0)}


def test_stale_in_one_database_and_swallowed_commits_in_neither(two: tuple[Db, Db]) -> None:
    for _ in range(20):  # the session commits its databases in any order
        two[0].overtake()
        with over_both(two) as session, guarded(session, OLD):
            session.execute(sa.update(Parcel).values(state="only this"))
            with contextlib.suppress(StaleToken):
                session.execute(sa.update(Invoice).values(state="stale"))
            with pytest.raises(StaleToken):
                session.commit()
        assert two[0].invoice() == ("newer", NEW.token)
        assert two[1].invoice(Parcel) == ("open", 0)


def test_a_lease_lost_before_the_commit_commits_in_neither(two: tuple[Db, Db], leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with over_both(two) as session, guarded(session, lease):
        session.execute(sa.update(Parcel).values(state="both"))
        session.execute(sa.update(Invoice).values(state="both"))
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            session.commit()
    assert two[0].invoice() == two[1].invoice(Parcel) == ("open", 0)


def test_a_database_that_joins_later_gets_the_hooks_by_itself(tmp_path: Path, lite: Db) -> None:
    parcels = Db(f"sqlite:///{tmp_path}/parcels.db")
    bare = parcels.another_engine()
    parcels.overtake(model=Parcel)
    with Session(binds={Invoice: lite.engine, Parcel: bare}) as session, guarded(session, OLD):
        session.execute(PAY)
        with pytest.raises(StaleToken):
            session.execute(sa.update(Parcel).values(state="stale"))
    parcels.close()


# Guards inside guards


def test_the_same_lease_again_does_nothing(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.get(Invoice, 1).state = "paid"
        with guarded(session, OLD):
            session.flush()
        session.get(Invoice, 1).state = "sent"
        session.commit()
    assert db.invoice() == ("sent", OLD.token)


def test_another_lease_is_refused_and_the_first_one_stays(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        with pytest.raises(ConfigurationError, match="acquire_all"):
            guarded(session, NEW).__enter__()
        session.execute(PAY)
        session.commit()
    assert db.invoice() == ("paid", OLD.token)


def test_another_lease_is_refused_while_the_transaction_of_the_first_is_open(db: Db) -> None:
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.execute(PAY)
        with pytest.raises(ConfigurationError, match="guarded by a lease on 'invoice:1' already"):
            guarded(session, NEW).__enter__()
        session.rollback()
        with guarded(session, NEW):
            session.execute(PAY)
            session.commit()
    assert db.invoice() == ("paid", NEW.token)


def test_a_session_on_a_guarded_connection_takes_no_other_lease(db: Db) -> None:
    with db.engine.begin() as connection, guarded(connection, OLD), Session(connection) as session:
        with pytest.raises(ConfigurationError, match="already"):
            guarded(session, NEW).__enter__()
        with guarded(session, OLD):
            session.execute(PAY)
    assert db.invoice() == ("paid", OLD.token)


def test_a_session_on_a_guarded_connection_is_guarded_with_it(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection, guarded(connection, OLD), Session(connection) as session:
        session.get(Invoice, 1).state = "stale"
        with pytest.raises(StaleToken):
            session.flush()
    assert db.invoice() == ("newer", NEW.token)


def test_a_connection_of_a_guarded_session_takes_no_other_lease(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        with pytest.raises(ConfigurationError, match="already"):
            guarded(session.connection(), NEW).__enter__()


def test_blocks_may_be_left_in_any_order(lite: Db) -> None:
    with Session(lite.engine) as session:
        outer, inner = guarded(session, OLD), guarded(session, OLD)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        session.execute(PAY)
        session.commit()
        inner.__exit__(None, None, None)
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
    assert lite.invoice() == ("paid", OLD.token)


# The end


def test_a_transaction_ends_under_the_guard_it_began_with(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.add(Note(id=1, words="with the stale write"))
            session.flush()
            with contextlib.suppress(StaleToken):
                session.execute(PAY)
        with pytest.raises(StaleToken):
            session.commit()
    assert db.notes() == []


def test_changes_that_are_flushed_after_the_block_are_stamped(db: Db) -> None:
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.get(Invoice, 1).state = "paid"
        session.commit()
    assert db.invoice() == ("paid", OLD.token)


def test_changes_that_are_flushed_after_the_block_are_compared(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.get(Invoice, 1).state = "paid"
        with pytest.raises(StaleToken):
            session.commit()
    assert db.invoice() == ("newer", NEW.token)


def test_statements_after_the_block_are_guarded_until_the_commit(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection:
        with guarded(connection, OLD):
            connection.execute(sa.select(INVOICE))
        with pytest.raises(StaleToken):
            connection.execute(PAY)


def test_the_lease_is_checked_at_a_commit_after_the_block(db: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with Session(db.engine) as session:
        with guarded(session, lease):
            session.execute(PAY)
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            session.commit()
    assert db.invoice() == ("open", 0)


def test_the_lease_is_checked_at_a_connection_s_commit_after_the_block(db: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with db.engine.connect() as connection:
        with guarded(connection, lease):
            connection.execute(PAY)
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            connection.commit()
    assert db.invoice() == ("open", 0)


def test_changes_of_a_block_that_never_talked_are_flushed_under_its_guard(db: Db) -> None:
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.add(Invoice(id=2, state="new"))
        session.commit()
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
    assert db.outside(sa.select(INVOICE.c.fence_token).where(INVOICE.c.id == 2)) == [(OLD.token,)]


def test_changes_made_after_a_block_that_never_talked_are_refused(db: Db) -> None:
    with Session(db.engine) as session:
        with guarded(session, OLD):
            pass
        session.add(Invoice(id=2, state="new"))
        with pytest.raises(UnguardedWrite):
            session.commit()
    assert db.outside(sa.select(sa.func.count()).select_from(INVOICE)) == [(1,)]


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_the_next_transaction_is_not_guarded(db: Db, end: str) -> None:
    with Session(db.engine) as session:
        with guarded(session, OLD):
            session.execute(PAY)
        getattr(session, end)()
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
        session.rollback()
        with guarded(session, NEW):
            session.execute(PAY)
            session.commit()
    assert db.invoice() == ("paid", NEW.token)


def test_several_transactions_in_one_block_are_guarded(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.execute(PAY)
        session.commit()
        session.execute(PAY)
        session.rollback()
        db.overtake()
        with pytest.raises(StaleToken):
            session.execute(PAY)
    assert db.invoice() == ("newer", NEW.token)


# A session on a connection of the test's own


@pytest.fixture
def rolled_back(db: Db) -> Iterator[tuple[Db, Session]]:
    """SQLAlchemy's recipe for tests: whatever the session commits is taken back at the end."""
    with db.engine.connect() as connection:
        outer = connection.begin()
        if db.kind == "sqlite":
            connection.exec_driver_sql("BEGIN")  # the driver alone would not begin before the savepoint
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield db, session
        outer.rollback()


def read(session: Session) -> tuple[str, int]:
    return tuple(session.execute(sa.select(INVOICE.c.state, INVOICE.c.fence_token)).one())


def test_a_session_in_a_fixtures_transaction_is_guarded(rolled_back: tuple[Db, Session]) -> None:
    db, session = rolled_back
    with guarded(session, NEW):
        session.get(Invoice, 1).state = "paid"
        session.commit()
    assert read(session) == ("paid", NEW.token)
    session.commit()
    assert db.kind == "sqlite" or db.invoice() == ("open", 0)


def test_a_stale_write_in_a_fixtures_transaction_is_refused(rolled_back: tuple[Db, Session]) -> None:
    _, session = rolled_back
    with guarded(session, NEW):
        session.execute(PAY)
        session.commit()
    with guarded(session, OLD):
        with pytest.raises(StaleToken):
            session.execute(PAY.values(state="stale"))
        session.rollback()
    assert read(session) == ("paid", NEW.token)


def test_a_swallowed_stale_write_in_a_fixtures_transaction_is_not_committed(
    rolled_back: tuple[Db, Session],
) -> None:
    _, session = rolled_back
    with guarded(session, NEW):
        session.execute(PAY)
        session.commit()
    with guarded(session, OLD):
        session.add(Note(id=1, words="with the stale write"))
        session.flush()
        with contextlib.suppress(StaleToken):
            session.execute(PAY.values(state="stale"))
        with pytest.raises(StaleToken):
            session.commit()
        session.rollback()
    assert session.scalars(sa.select(Note.id)).all() == []


def test_a_fixtures_session_recovers_from_a_stale_write(rolled_back: tuple[Db, Session]) -> None:
    _, session = rolled_back
    with guarded(session, NEW):
        session.execute(PAY)
        session.commit()
    with guarded(session, OLD):
        with pytest.raises(StaleToken):
            session.execute(PAY.values(state="stale"))
        session.rollback()
    with guarded(session, grant(30)):
        session.execute(PAY.values(state="third"))
        session.commit()
    assert read(session) == ("third", 30)


def test_an_unguarded_write_after_a_guarded_one_in_a_fixtures_transaction_is_refused(
    rolled_back: tuple[Db, Session],
) -> None:
    _, session = rolled_back
    with guarded(session, NEW):
        session.execute(PAY)
        session.commit()
    with pytest.raises(UnguardedWrite):
        session.execute(PAY)


@pytest.mark.parametrize(
    "mode", ["create_savepoint", "conditional_savepoint", "rollback_only", "control_fully"]
)
@pytest.mark.parametrize("ends", ["outside alone", "session first"])
def test_a_refusal_in_a_session_keeps_the_transaction_around_it_from_being_committed(
    db: Db, mode: Any, ends: str
) -> None:
    db.overtake()
    with db.engine.connect() as connection:
        outer = connection.begin()
        if db.kind == "sqlite":
            connection.exec_driver_sql("BEGIN")
        with Session(bind=connection, join_transaction_mode=mode) as session:
            with guarded(session, OLD):
                session.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
                with contextlib.suppress(StaleToken):
                    session.execute(PAY)
            if ends == "session first":
                with pytest.raises(StaleToken):
                    session.commit()
            with pytest.raises((StaleToken, sa.exc.InvalidRequestError)):
                outer.commit()
    assert db.notes() == []


def test_a_refusal_in_a_session_is_not_forgotten_for_another_one_on_its_connection(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection:
        outer = connection.begin()
        if db.kind == "sqlite":
            connection.exec_driver_sql("BEGIN")
        first, second = (Session(connection, join_transaction_mode="create_savepoint") for _ in range(2))
        with guarded(first, OLD):
            first.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
            with contextlib.suppress(StaleToken):
                first.execute(PAY)
        with pytest.raises(StaleToken):
            with unguarded(second, reason="repair"):
                second.execute(sa.insert(Note), {"id": 2, "words": "of another session"})
                second.commit()
            outer.commit()
        second.close()
        first.close()
    assert db.notes() == []


# The lease of the context


def test_a_fenced_session_picks_up_the_lease_of_its_context(db: Db) -> None:
    with using(OLD), sessionmaker(db.engine, class_=FencedSession)() as session:
        session.get(Invoice, 1).state = "paid"
        session.commit()
        db.overtake()
        session.get(Invoice, 1).state = "stale"
        with pytest.raises(StaleToken):
            session.commit()
    assert db.invoice() == ("newer", NEW.token)


def test_an_async_fenced_session_picks_up_the_lease_of_its_context(db: Db) -> None:
    async def work() -> None:
        async with AsyncDb(db) as engine:
            sessions = async_sessionmaker(engine, sync_session_class=FencedSession)
            with using(OLD):
                async with sessions.begin() as session:
                    (await session.get(Invoice, 1)).state = "paid"

    do(work)
    assert db.invoice() == ("paid", OLD.token)


def test_a_fenced_session_without_a_context_is_not_guarded(lite: Db) -> None:
    with using(OLD):
        pass
    with FencedSession(lite.engine) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)


def test_a_plain_session_does_not_look_at_the_context(lite: Db) -> None:
    with using(OLD), Session(lite.engine) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)


def test_an_explicit_guard_comes_before_the_context(lite: Db) -> None:
    with using(OLD), FencedSession(lite.engine) as session, guarded(session, NEW):
        session.execute(PAY)
        session.commit()
    assert lite.invoice() == ("paid", NEW.token)


def test_a_transaction_keeps_the_lease_it_began_with_in_another_context(lite: Db) -> None:
    lite.overtake()
    with FencedSession(lite.engine) as session:
        with using(OLD):
            session.execute(sa.select(INVOICE)).all()
        with using(NEW), pytest.raises(StaleToken):
            session.execute(PAY)


def test_contexts_nest(lite: Db) -> None:
    with using(OLD), FencedSession(lite.engine) as session:
        with using(NEW):
            session.execute(PAY)
            session.commit()
        assert lite.invoice() == ("paid", NEW.token)
        with pytest.raises(StaleToken):
            session.execute(PAY)


def test_a_transaction_ends_under_the_lease_of_the_context_it_began_in(lite: Db) -> None:
    lite.overtake()
    with FencedSession(lite.engine) as session:
        with using(OLD):
            session.add(Note(id=1, words="with the stale write"))
            session.flush()
            with contextlib.suppress(StaleToken):
                session.execute(PAY)
        with pytest.raises(StaleToken):
            session.commit()
    assert lite.notes() == []


def test_a_transaction_that_began_before_the_context_is_not_guarded_by_it(lite: Db) -> None:
    with FencedSession(lite.engine) as session:
        session.get(Invoice, 1)
        with using(OLD):
            session.get(Invoice, 1).state = "paid"
            with pytest.raises(UnguardedWrite):
                session.commit()


def test_a_fenced_session_reads_again_what_it_loaded_before_the_lease(lite: Db) -> None:
    with FencedSession(lite.engine, expire_on_commit=False) as session:
        invoice = session.get(Invoice, 1)
        session.commit()
        lite.outside(sa.update(INVOICE).values(state="changed meanwhile"))
        with using(OLD):
            session.execute(sa.select(Note)).all()
            assert invoice.state == "changed meanwhile"


def test_a_fenced_session_refuses_changes_of_what_it_loaded_before_the_lease(lite: Db) -> None:
    with FencedSession(lite.engine, expire_on_commit=False) as session:
        invoice = session.get(Invoice, 1)
        session.commit()
        with using(OLD):
            invoice.state = invoice.state + " and paid"
            with pytest.raises(ConfigurationError, match="read before the lease was held"):
                session.commit()
    assert lite.invoice() == ("open", 0)


def test_a_fenced_session_keeps_what_it_loaded_under_the_same_lease(lite: Db) -> None:
    with using(OLD), FencedSession(lite.engine, expire_on_commit=False) as session:
        invoice = session.get(Invoice, 1)
        with sent(lite.engine) as statements:
            session.commit()
            session.execute(sa.select(Note)).all()
            assert invoice.state == "open"
        assert len(statements) == 1


def test_threads_have_contexts_of_their_own(lite: Db) -> None:
    lite.outside(sa.insert(INVOICE), [{"id": 2, "state": "open"}, {"id": 3, "state": "open"}])
    all_inside, one_at_a_time = threading.Barrier(3), threading.Lock()
    outcome: dict[int, Any] = {}

    def pay(id_: int, lease: Any) -> None:
        with using(lease) if lease else contextlib.nullcontext():
            all_inside.wait(10)
            with one_at_a_time, FencedSession(lite.engine) as session:
                try:
                    session.get(Invoice, id_).state = "paid"
                    session.commit()
                except UnguardedWrite as refused:
                    outcome[id_] = type(refused)

    with using(grant(99)):
        threads = [threading.Thread(target=pay, args=each) for each in ((1, OLD), (2, NEW), (3, None))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    rows = lite.outside(
        sa.select(INVOICE.c.id, INVOICE.c.state, INVOICE.c.fence_token).order_by(INVOICE.c.id)
    )
    assert rows == [(1, "paid", OLD.token), (2, "paid", NEW.token), (3, "open", 0)]
    assert outcome == {3: UnguardedWrite}


def test_tasks_have_contexts_of_their_own(lite: Db) -> None:
    lite.outside(sa.insert(INVOICE), {"id": 2, "state": "open"})

    async def work() -> None:
        all_inside, one_at_a_time = asyncio.Barrier(2), asyncio.Lock()

        async def pay(id_: int, lease: Any) -> None:
            with using(lease):
                await all_inside.wait()
                async with one_at_a_time, sessions() as session:
                    (await session.get(Invoice, id_)).state = "paid"
                    await session.commit()

        async with AsyncDb(lite) as engine:
            sessions = async_sessionmaker(engine, sync_session_class=FencedSession)
            async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
                tasks.create_task(pay(1, OLD))
                tasks.create_task(pay(2, NEW))

    do(work)
    rows = lite.outside(sa.select(INVOICE.c.id, INVOICE.c.fence_token).order_by(INVOICE.c.id))
    assert rows == [(1, OLD.token), (2, NEW.token)]


def test_a_task_inherits_the_context_it_was_made_in(lite: Db) -> None:
    async def work() -> None:
        async with AsyncDb(lite) as engine:
            sessions = async_sessionmaker(engine, sync_session_class=FencedSession)

            async def pay() -> None:
                async with sessions.begin() as session:
                    await session.execute(PAY)

            with using(OLD):
                task = asyncio.create_task(pay())
            await task

    do(work)
    assert lite.invoice() == ("paid", OLD.token)


# The way out


def test_an_unguarded_block_lets_writes_through_and_tells_why(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session:
        with unguarded(session, reason="backfill 2026-11"):
            session.execute(sa.update(Invoice).values(state="backfilled"))
            session.add(Invoice(id=2, state="made up"))
            session.commit()
    assert db.invoice() == ("backfilled", NEW.token)
    told = [(event.table, event.verb, event.allowed, event.reason) for event in db.unguarded()]
    assert told == [
        (INVOICE.name, "update", True, "backfill 2026-11"),
        (INVOICE.name, "insert", True, "backfill 2026-11"),
    ]


def test_an_unguarded_block_ends_with_the_block(db: Db) -> None:
    with Session(db.engine) as session:
        with unguarded(session, reason="repair"):
            session.execute(PAY)
        with pytest.raises(UnguardedWrite):
            session.execute(PAY.values(state="more"))
        session.rollback()
        with unguarded(session, reason="repair"):
            pass
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
    assert db.invoice() == ("open", 0)


def test_an_unguarded_block_inside_a_guard(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.execute(PAY)
        with unguarded(session, reason="repair"):
            session.execute(sa.insert(INVOICE).values(id=2, state="unstamped"))
        session.execute(sa.insert(INVOICE).values(id=3, state="stamped"))
        session.commit()
    rows = db.outside(sa.select(INVOICE.c.id, INVOICE.c.fence_token).order_by(INVOICE.c.id))
    assert rows == [(1, OLD.token), (2, 0), (3, OLD.token)]
    assert [event.reason for event in db.unguarded()] == ["repair"]


def test_a_refusal_before_an_unguarded_block_still_keeps_all_from_being_committed(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        with contextlib.suppress(StaleToken):
            session.execute(PAY)
        with unguarded(session, reason="repair"):
            session.execute(PAY)
            with pytest.raises(StaleToken):
                session.commit()
    assert db.invoice() == ("newer", NEW.token)


def test_an_unguarded_block_on_a_connection_and_on_async_sessions(lite: Db) -> None:
    with lite.engine.begin() as connection, unguarded(connection, reason="repair"):
        connection.execute(PAY)

    async def work() -> None:
        async with AsyncDb(lite) as engine, AsyncSession(engine) as session:
            with unguarded(session, reason="async repair"):
                await session.execute(PAY.values(state="twice"))
                await session.commit()

    do(work)
    assert lite.invoice() == ("twice", 0)
    assert [event.reason for event in lite.unguarded()] == ["repair", "async repair"]


def test_an_unguarded_block_in_the_middle_of_a_transaction(db: Db) -> None:
    with Session(db.engine) as session:
        session.get(Invoice, 1).state = "paid"
        with unguarded(session, reason="repair"):
            session.commit()
    assert db.invoice() == ("paid", 0)


@pytest.mark.parametrize("reason", ["", "  ", None, 42])
def test_an_unguarded_block_wants_a_reason(lite: Db, reason: Any) -> None:
    with Session(lite.engine) as session:
        with pytest.raises(ConfigurationError, match="reason"):
            unguarded(session, reason=reason).__enter__()


# The engine


def test_a_write_without_a_guard_is_refused_and_says_what_to_do(db: Db) -> None:
    with Session(db.engine) as session:
        session.get(Invoice, 1).state = "paid"
        with pytest.raises(UnguardedWrite) as refused:
            session.commit()
    assert refused.value.table == INVOICE.name
    for hint in (INVOICE.name, "guarded(session, lease)", "unguarded(session, reason=...)"):
        assert hint in str(refused.value)
    assert [(event.allowed, event.reason) for event in db.unguarded()] == [(False, "refused")]
    assert db.invoice() == ("open", 0)


def test_a_staged_roll_out_lets_unguarded_writes_through_and_tells(lite: Db) -> None:
    install(lite.engine, unguarded="warn")
    with Session(lite.engine) as session:
        session.get(Invoice, 1).state = "paid"
        session.commit()
        with guarded(session, OLD):
            session.execute(PAY.values(state="guarded"))
            session.commit()
    assert lite.invoice() == ("guarded", OLD.token)
    assert [(event.verb, event.allowed, event.reason) for event in lite.unguarded()] == [
        ("update", True, "warn")
    ]


def test_a_staged_roll_out_writes_to_the_log_when_nobody_listens(
    lite: Db, caplog: pytest.LogCaptureFixture
) -> None:
    engine = lite.another_engine()
    install(engine, unguarded="warn")
    with engine.begin() as connection:
        connection.execute(PAY)
    assert "write.unguarded" in caplog.text
    assert INVOICE.name in caplog.text


def test_installing_again_changes_the_settings_and_nothing_else(lite: Db) -> None:
    install(lite.engine, unguarded="warn")
    install(lite.engine)
    install(lite.engine, unguarded="refuse")
    with Session(lite.engine) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
        session.rollback()
        with guarded(session, OLD), sent(lite.engine) as statements:
            session.execute(PAY)
            session.commit()
    assert len(statements) == 1
    assert statements[0].count("fence_token") == 3, "stamped and compared once"
    assert len(lite.unguarded()) == 1


@pytest.mark.parametrize("wrong", ["postgresql://", None, Session])
def test_only_an_engine_can_be_installed_on(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes an Engine"):
        install(wrong)


def test_an_unknown_setting_is_refused(lite: Db) -> None:
    with pytest.raises(ConfigurationError, match="'refuse' or 'warn'"):
        install(lite.engine, unguarded="ignore")  # type: ignore[arg-type]


def test_guarded_installs_by_itself(db: Db) -> None:
    engine = db.another_engine()
    db.overtake()
    with Session(engine) as session, guarded(session, OLD):
        with pytest.raises(StaleToken):
            session.execute(PAY)
    with Session(engine) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)


@pytest.mark.parametrize("first", ["the engine", "the clone", "the clone, then the engine"])
def test_an_engine_with_options_is_guarded_like_the_one_it_came_from(lite: Db, first: str) -> None:
    engine = lite.another_engine()
    clone = engine.execution_options(stream_results=False)
    for each in {"the engine": [engine], "the clone": [clone]}.get(first, [clone, engine]):
        install(each, observers=[lite.told.observe])
    with Session(clone) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(PAY)
        session.rollback()
        with guarded(session, OLD):
            session.execute(PAY)
            session.commit()
        assert lite.invoice() == ("paid", OLD.token)
        lite.overtake()
        with guarded(session, OLD):
            with pytest.raises(StaleToken):
                session.execute(PAY)
    assert len(lite.unguarded()) == 1


def test_a_clone_made_in_mid_flight_is_guarded(lite: Db) -> None:
    with Session(lite.engine.execution_options(compiled_cache=None)) as session, guarded(session, OLD):
        lite.overtake()
        with pytest.raises(StaleToken):
            session.execute(PAY, execution_options={"compiled_cache": {}})


# Transactions that cannot be guarded


def by_engine_option(db: Db) -> Engine:
    return db.engine.execution_options(isolation_level="AUTOCOMMIT")


def by_create_engine(db: Db) -> Engine:
    engine = db.another_engine(isolation_level="AUTOCOMMIT")
    install(engine)
    return engine


def by_create_engine_without_install(db: Db) -> Engine:
    return db.another_engine(isolation_level="AUTOCOMMIT")


@pytest.mark.parametrize("make", [by_engine_option, by_create_engine, by_create_engine_without_install])
def test_autocommit_of_an_engine_is_refused(db: Db, make: Callable[[Db], Engine]) -> None:
    engine = make(db)
    with Session(engine) as session, guarded(session, OLD):
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.execute(PAY)
    with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"), guarded(connection, OLD):
            connection.execute(PAY)
    assert db.invoice() == ("open", 0)


def test_autocommit_of_a_connection_is_refused(db: Db) -> None:
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with guarded(connection, OLD), pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            connection.execute(PAY)
    with db.engine.connect() as connection, guarded(connection, OLD):
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            connection.execute(PAY)
    assert db.invoice() == ("open", 0)


def test_autocommit_of_a_session_s_connection_is_refused(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            session.execute(PAY)
    assert db.invoice() == ("open", 0)


def test_autocommit_that_began_before_the_guard_is_refused(db: Db) -> None:
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with connection.begin(), pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            with guarded(connection, OLD):
                connection.execute(PAY)
    assert db.invoice() == ("open", 0)


def test_autocommit_of_an_async_engine_is_refused(db: Db) -> None:
    async def work() -> None:
        async with AsyncDb(db) as engine:
            clone = engine.execution_options(isolation_level="AUTOCOMMIT")
            async with AsyncSession(clone) as session, guarded(session, OLD):
                with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                    await session.execute(PAY)

    do(work)
    assert db.invoice() == ("open", 0)


def begins_by_itself(engine: Engine) -> None:
    """SQLAlchemy's recipe for real transactions on SQLite: the driver begins none, an event does."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@pytest.mark.parametrize("order", ["recipe first", "guard first"])
@pytest.mark.parametrize("target", ["session", "connection", "open connection"])
def test_sqlite_with_transactions_of_its_own_is_accepted(lite: Db, order: str, target: str) -> None:
    engine = lite.another_engine()
    for step in (begins_by_itself, install) if order == "recipe first" else (install, begins_by_itself):
        step(engine)
    if target == "session":
        with Session(engine) as session, guarded(session, OLD):
            session.execute(PAY)
            session.commit()
    elif target == "connection":
        with engine.connect() as connection, guarded(connection, OLD):
            connection.execute(PAY)
            connection.commit()
    else:
        with engine.connect() as connection, connection.begin(), guarded(connection, OLD):
            connection.execute(PAY)
    assert lite.invoice() == ("paid", OLD.token)


def test_aiosqlite_with_transactions_of_its_own_is_accepted(lite: Db) -> None:
    async def work() -> None:
        async with AsyncDb(lite) as engine:
            begins_by_itself(engine.sync_engine)
            async with AsyncSession(engine) as session, guarded(session, OLD):
                await session.execute(PAY)
                await session.commit()

    do(work)
    assert lite.invoice() == ("paid", OLD.token)


def test_a_two_phase_session_is_refused(db: Db) -> None:
    with Session(db.engine, twophase=True) as session:
        with pytest.raises(ConfigurationError, match="two-phase"):
            guarded(session, OLD).__enter__()


def test_a_two_phase_fenced_session_is_refused(pg: Db) -> None:
    pg.overtake()
    with using(OLD), FencedSession(pg.engine, twophase=True) as session:
        with pytest.raises(ConfigurationError, match="two-phase"):
            session.execute(PAY)


def test_a_two_phase_transaction_of_a_guarded_connection_is_refused(pg: Db) -> None:
    with pg.engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(ConfigurationError, match="two-phase"):
            connection.begin_twophase()


def test_a_two_phase_transaction_that_began_before_the_guard_is_refused(pg: Db) -> None:
    with pg.engine.connect() as connection:
        connection.begin().rollback()
        with connection.begin_twophase():
            with pytest.raises(ConfigurationError):
                guarded(connection, OLD).__enter__()


# The lease


@pytest.fixture
def silent(leases: FakeLeases, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lease whose backend must not be asked any more."""
    lease = leases.leases.acquire("invoice:1", ttl=30)

    def ask(*command: Any) -> None:
        raise AssertionError(f"a round trip: {command}")

    monkeypatch.setattr(leases.backend, "ask", ask)
    return lease


def test_no_statement_is_sent_when_the_lease_is_lost(db: Db, leases: FakeLeases, silent: Any) -> None:
    with sent(db.engine) as statements, Session(db.engine) as session, guarded(session, silent):
        session.get(Invoice, 1)
        assert len(statements) == 1
        leases.clock.pause(31)
        for statement in (PAY, sa.select(INVOICE), sa.insert(Note), text("SELECT 1")):
            with pytest.raises(LeaseLost) as lost:
                session.execute(statement)
            assert lost.value.reason == "expired"
        assert len(statements) == 1


def test_no_driver_statement_is_sent_when_the_lease_is_lost(db: Db, leases: FakeLeases, silent: Any) -> None:
    with sent(db.engine) as statements, db.engine.connect() as connection, guarded(connection, silent):
        connection.exec_driver_sql("SELECT 1")
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            connection.exec_driver_sql("SELECT 1")
        assert len(statements) == 1


def test_no_flush_is_sent_when_the_lease_is_lost(db: Db, leases: FakeLeases, silent: Any) -> None:
    with sent(db.engine) as statements, Session(db.engine) as session, guarded(session, silent):
        session.get(Invoice, 1).state = "paid"
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            session.flush()
        assert len(statements) == 1


def test_a_session_s_commit_is_not_sent_when_the_lease_is_lost(
    db: Db, leases: FakeLeases, silent: Any
) -> None:
    with Session(db.engine) as session, guarded(session, silent):
        session.execute(PAY)
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            session.commit()
    assert db.invoice() == ("open", 0)


def test_a_connection_s_commit_is_not_sent_when_the_lease_is_lost(
    db: Db, leases: FakeLeases, silent: Any
) -> None:
    with db.engine.connect() as connection, guarded(connection, silent):
        connection.execute(PAY)
        leases.clock.pause(31)
        with pytest.raises(LeaseLost):
            connection.commit()
    assert db.invoice() == ("open", 0)


def test_a_guarded_transaction_asks_the_backend_for_nothing(db: Db, silent: Any) -> None:
    with Session(db.engine) as session, guarded(session, silent):
        session.execute(PAY)
        session.commit()
    assert db.invoice() == ("paid", silent.token)


def test_a_released_lease_is_refused(db: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with sent(db.engine) as statements, Session(db.engine) as session, guarded(session, lease):
        session.execute(PAY)
        lease.release()
        with pytest.raises(LeaseNotHeld):
            session.execute(PAY)
        with pytest.raises(LeaseNotHeld):
            session.commit()
        assert len(statements) == 1
    assert db.invoice() == ("open", 0)


def test_a_lost_lease_does_not_keep_a_session_from_rolling_back(
    db: Db, leases: FakeLeases, silent: Any
) -> None:
    with Session(db.engine) as session, guarded(session, silent):
        session.execute(PAY)
        leases.clock.pause(31)
        session.rollback()
    assert db.invoice() == ("open", 0)


def test_the_observers_of_the_lease_are_told_of_its_writes(db: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with Session(db.engine) as session, guarded(session, lease):
        session.execute(PAY)
        session.commit()
        db.overtake(grant(lease.token + 1))
        with pytest.raises(StaleToken) as refused:
            session.execute(PAY)
    [admitted] = leases.told.of(WriteAdmitted)
    assert (admitted.table, admitted.verb, admitted.token) == (INVOICE.name, "update", lease.token)
    [told] = leases.told.of(WriteRefused)
    assert (told.table, told.verb, told.reason, told.error) == (
        INVOICE.name,
        "update",
        "stale",
        str(refused.value),
    )


# A refusal that the program swallows


def test_a_swallowed_refusal_is_not_committed(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        session.add(Note(id=1, words="with the stale write"))
        session.flush()
        with contextlib.suppress(StaleToken):
            session.execute(PAY)
        session.add(Note(id=2, words="after it"))
        with pytest.raises(StaleToken):
            session.commit()
    assert db.notes() == []
    assert db.invoice() == ("newer", NEW.token)


def test_a_refusal_swallowed_with_its_savepoint_is_not_committed(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        session.add(Note(id=1, words="with the stale write"))
        session.flush()
        with contextlib.suppress(StaleToken), session.begin_nested():
            session.get(Invoice, 1).state = "stale"
        with session.begin_nested():
            session.add(Note(id=2, words="after it"))
        with pytest.raises(StaleToken):
            session.commit()
    assert db.notes() == []


def test_a_refusal_swallowed_with_a_savepoint_of_a_connection_is_not_committed(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection, guarded(connection, OLD):
        connection.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
        with contextlib.suppress(StaleToken), connection.begin_nested():
            connection.execute(PAY)
        with pytest.raises(StaleToken):
            connection.commit()
    assert db.notes() == []


def test_a_refusal_is_not_committed_through_the_session_s_connection(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        session.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
        with contextlib.suppress(StaleToken):
            session.connection().execution_options(traced=True).execute(PAY)
        with pytest.raises(StaleToken):
            session.connection().get_transaction().commit()
    assert db.notes() == []


@pytest.mark.parametrize("words", ["COMMIT", "commit;", "END", "/* done */ COMMIT"])
def test_a_refusal_is_not_committed_by_text(db: Db, words: str) -> None:
    db.overtake()
    for execute in (sa.Connection.exec_driver_sql, lambda c, words: c.execute(text(words))):
        with db.engine.connect() as connection, guarded(connection, OLD):
            connection.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
            with contextlib.suppress(StaleToken):
                connection.execute(PAY)
            with contextlib.suppress(StaleToken, UnverifiableWrite, ConfigurationError):
                execute(connection, words)
        assert db.notes() == []


def test_a_refusal_is_forgotten_with_its_transaction(db: Db) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        with contextlib.suppress(StaleToken):
            session.execute(PAY)
        session.rollback()
        session.add(Note(id=1, words="a new transaction"))
        session.commit()
    assert db.notes() == [1]


def test_after_a_veto_nothing_of_the_old_transaction_is_committed_by_the_next(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection, guarded(connection, OLD):
        connection.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
        with contextlib.suppress(StaleToken):
            connection.execute(PAY)
        with pytest.raises(StaleToken):
            connection.commit()
        connection.rollback()
        connection.execute(sa.insert(Note), {"id": 2, "words": "a new transaction"})
        connection.commit()
    assert db.notes() == [2]


def test_after_a_veto_in_engine_begin_nothing_is_committed(db: Db) -> None:
    db.overtake()
    with pytest.raises(StaleToken):
        with db.engine.begin() as connection, guarded(connection, OLD):
            connection.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
            with contextlib.suppress(StaleToken):
                connection.execute(PAY)
    with db.engine.begin() as connection:
        connection.execute(sa.insert(Note), {"id": 2, "words": "from the pool"})
    assert db.notes() == [2]


def test_after_a_veto_of_an_async_connection_nothing_of_it_is_committed(db: Db) -> None:
    db.overtake()

    async def work() -> None:
        async with AsyncDb(db) as engine, engine.connect() as connection, guarded(connection, OLD):
            await connection.execute(sa.insert(Note), {"id": 1, "words": "with the stale write"})
            with contextlib.suppress(StaleToken):
                await connection.execute(PAY)
            with pytest.raises(StaleToken):
                await connection.commit()
            await connection.rollback()
            await connection.execute(sa.insert(Note), {"id": 2, "words": "a new transaction"})
            await connection.commit()

    do(work)
    assert db.notes() == [2]


def test_a_lost_lease_at_the_commit_of_a_connection_leaves_nothing_behind(db: Db, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    with db.engine.connect() as connection:
        with guarded(connection, lease):
            connection.execute(sa.insert(Note), {"id": 1, "words": "too late"})
            leases.clock.pause(31)
            with pytest.raises(LeaseLost):
                connection.commit()
        connection.rollback()
        connection.execute(sa.insert(Note), {"id": 2, "words": "a new transaction"})
        connection.commit()
    assert db.notes() == [2]


# SQL that is only text

WRITES = [
    f"UPDATE {INVOICE.name} SET state = 'x'",
    f"update only public.{INVOICE.name} set state = 'x'",
    f"UPDATE \"{INVOICE.name}\" SET state = 'x'",
    f"/* why */ INSERT INTO {INVOICE.name} (id, state) VALUES (7, 'x')",
    f"-- why\nDELETE FROM {INVOICE.name}",
    f"WITH gone AS (DELETE FROM {INVOICE.name} RETURNING id) SELECT * FROM gone",
    f"TRUNCATE TABLE {INVOICE.name}",
    f"COPY {INVOICE.name} (id, state) FROM STDIN",
    f"MERGE INTO {INVOICE.name} USING x ON true WHEN MATCHED THEN DELETE",
    f"REPLACE INTO {INVOICE.name} (id, state) VALUES (1, 'x')",
    f"SELECT 1; UPDATE {INVOICE.name.upper()} SET state = 'x'",
    f"SELECT '--'; DELETE FROM {INVOICE.name}",
]


@pytest.mark.parametrize("statement", WRITES)
def test_text_that_writes_is_refused_under_a_guard(lite: Db, statement: str) -> None:
    for execute in (
        lambda connection: connection.execute(text(statement.replace(":", r"\:"))),
        lambda connection: connection.exec_driver_sql(statement),
    ):
        with sent(lite.engine) as statements, lite.engine.connect() as connection, guarded(connection, OLD):
            with pytest.raises(UnverifiableWrite) as refused:
                execute(connection)
            assert statements == []
            assert refused.value.table == INVOICE.name
            connection.execute(sa.insert(Note), {"id": 1, "words": "in the same transaction"})
            with pytest.raises(UnverifiableWrite):
                connection.commit()
    assert lite.notes() == []


def test_text_in_a_ddl_element_that_writes_is_refused_under_a_guard(db: Db) -> None:
    db.overtake()
    with db.engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(UnverifiableWrite):
            connection.execute(sa.DDL(f"UPDATE {INVOICE.name} SET state = 'by ddl'"))
        with pytest.raises(UnverifiableWrite):
            connection.commit()
    assert db.invoice() == ("newer", NEW.token)


FIRST = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from fencing import Grant, UnverifiableWrite
from fencing.sql import Fenced, guarded

class Base(DeclarativeBase): ...

class Job(Fenced, Base):
    __tablename__ = "job"
    id: Mapped[int] = mapped_column(primary_key=True)

engine = sa.create_engine("sqlite://")
Base.metadata.create_all(engine)
with engine.connect() as connection:
    with guarded(connection, Grant("work", ("job:1",), "0" * 32, 10, 0.0)):
        try:
            connection.execute(sa.text("INSERT INTO job (id) VALUES (1)"))
        except UnverifiableWrite:
            pass
        else:
            raise SystemExit("admitted")
engine.dispose()
"""


def test_text_that_writes_is_refused_also_as_the_first_statement_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("execute", ["text", "driver"])
def test_text_that_writes_is_reported_without_a_guard(db: Db, execute: str) -> None:
    statement = f"UPDATE {INVOICE.name} SET state = 'by text' WHERE id = 1"
    with db.engine.begin() as connection:
        connection.execute(text(statement)) if execute == "text" else connection.exec_driver_sql(statement)
    assert db.invoice() == ("by text", 0)
    told = [(event.table, event.allowed, event.reason) for event in db.unguarded()]
    assert set(told) == {(INVOICE.name, True, "text")}
    assert len(told) == 1, "told once"


def test_text_that_writes_is_let_through_in_an_unguarded_block(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        with unguarded(session, reason="repair"):
            session.execute(text(f"UPDATE {INVOICE.name} SET state = 'repaired'"))
        session.commit()
    assert db.invoice() == ("repaired", 0)
    assert {event.reason for event in db.unguarded()} == {"repair"}


READS = [
    f"SELECT id FROM {INVOICE.name} FOR UPDATE",
    f"SELECT id FROM {INVOICE.name} FOR NO KEY UPDATE",
    f"SELECT id FROM {INVOICE.name} FOR UPDATE OF {INVOICE.name} SKIP LOCKED",
    f"SELECT 'update {INVOICE.name}' AS said",
    f"SELECT 'it''s an update of {INVOICE.name}' AS said",
    f"/* delete from {INVOICE.name} */ SELECT 1",
    f"-- delete from {INVOICE.name}\nSELECT 1",
    f"SELECT replace(state, 'a', 'b') FROM {INVOICE.name}",
    f"SELECT id AS updated, state AS deleted FROM {INVOICE.name}",
    "INSERT INTO scene_note (id, words) VALUES (1, 'not fenced')",
    f"INSERT INTO scene_note (id, words) VALUES (1, 'about {INVOICE.name}')",
]


@pytest.mark.parametrize("statement", READS)
def test_text_that_does_not_write_is_let_through(pg: Db, statement: str) -> None:
    with Session(pg.engine) as session, guarded(session, OLD):
        session.execute(text(statement))
        session.connection().exec_driver_sql(statement.replace("(1, ", "(2, "))
        session.commit()
    assert pg.unguarded() == []


def test_copy_out_of_a_fenced_table_is_let_through(pg: Db) -> None:
    with pg.engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(DBAPIError, match="COPY"):
            connection.exec_driver_sql(f"COPY {INVOICE.name} TO STDOUT")
        connection.invalidate()  # psycopg has a method of its own for it, and is lost without


def test_text_with_columns_reads_under_a_guard(db: Db) -> None:
    statement = text(f"SELECT id, state FROM {INVOICE.name}").columns(Invoice.id, Invoice.state)
    with Session(db.engine) as session, guarded(session, OLD):
        assert session.execute(statement).all() == [(1, "open")]
        assert session.scalars(sa.select(Invoice).from_statement(statement)).one().state == "open"


RETURNING = text(f"UPDATE {INVOICE.name} SET state = 'x' RETURNING id, state")


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(RETURNING.columns(Invoice.id, Invoice.state), id="columns"),
        pytest.param(sa.select(Invoice).from_statement(RETURNING), id="from_statement"),
        pytest.param(
            sa.select(Invoice).from_statement(RETURNING.columns(Invoice.id, Invoice.state)),
            id="from_statement with columns",
        ),
        pytest.param(
            sa.select(RETURNING.columns(Invoice.id).cte("changed")), id="in a common table expression"
        ),
    ],
)
def test_text_with_columns_that_writes_is_refused(pg: Db, statement: Any) -> None:
    with Session(pg.engine) as session, guarded(session, OLD):
        with pytest.raises(UnverifiableWrite):
            session.execute(statement)
        with pytest.raises(UnverifiableWrite):
            session.commit()
    assert pg.invoice() == ("open", 0)


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(sa.update(Invoice).values(state="x").returning(Invoice), id="returning"),
        pytest.param(
            sa.select(Invoice).from_statement(sa.update(Invoice).values(state="x").returning(Invoice)),
            id="from_statement",
        ),
    ],
)
def test_dml_that_returns_rows_is_guarded(db: Db, statement: Any) -> None:
    db.overtake()
    with Session(db.engine) as session, guarded(session, OLD):
        with pytest.raises((StaleToken, UnverifiableWrite)):
            session.execute(statement).all()
        with pytest.raises((StaleToken, UnverifiableWrite)):
            session.commit()
    assert db.invoice() == ("newer", NEW.token)


def test_dml_that_returns_rows_is_refused_without_a_guard(db: Db) -> None:
    returning = sa.update(Invoice).values(state="x").returning(Invoice)
    for statement in (returning, sa.select(Invoice).from_statement(returning)):
        with Session(db.engine) as session:
            with pytest.raises(UnguardedWrite):
                session.execute(statement)
    assert db.invoice() == ("open", 0)


def test_dml_in_a_common_table_expression_is_refused_under_a_guard(pg: Db) -> None:
    paid = sa.update(Invoice).values(state="x").returning(Invoice.id).cte("paid")
    for statement in (
        sa.select(paid),
        sa.insert(Note).from_select(["id", "words"], sa.select(paid.c.id, sa.literal("by cte"))),
        sa.select(sa.select(paid).subquery()),
        sa.select(Note).add_cte(paid),
    ):
        with Session(pg.engine) as session, guarded(session, OLD):
            with pytest.raises(UnverifiableWrite):
                session.execute(statement)
            with pytest.raises(UnverifiableWrite):
                session.commit()
    assert pg.invoice() == ("open", 0)


def test_dml_in_a_common_table_expression_is_reported_without_a_guard(pg: Db) -> None:
    paid = sa.update(Invoice).values(state="by cte").returning(Invoice.id).cte("paid")
    with Session(pg.engine) as session:
        session.execute(sa.select(paid))
        session.commit()
    assert pg.invoice() == ("by cte", 0)
    assert [(event.allowed, event.reason) for event in pg.unguarded()] == [(True, "text")]


def test_reading_a_fenced_table_in_a_common_table_expression_is_let_through(db: Db) -> None:
    open_ones = sa.select(INVOICE.c.id).where(INVOICE.c.state == "open").cte("open_ones")
    with Session(db.engine) as session, guarded(session, OLD):
        session.execute(sa.update(Invoice).where(Invoice.id.in_(sa.select(open_ones.c.id))).values(state="x"))
        session.commit()
    assert db.invoice() == ("x", OLD.token)


def test_copy_into_a_fenced_table_is_refused_under_a_guard_and_reported_without(pg: Db) -> None:
    copy = f"COPY {INVOICE.name} (id, state) FROM STDIN"
    with pg.engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(UnverifiableWrite):
            connection.exec_driver_sql(copy)
    with pg.engine.connect() as connection:
        with pytest.raises(DBAPIError):
            connection.exec_driver_sql(copy)
        connection.invalidate()  # psycopg has a method of its own for it, and is lost without
    assert [(event.table, event.reason) for event in pg.unguarded()] == [(INVOICE.name, "text")]


# Rows that are not there


def test_a_missing_row_is_not_stale_for_core(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        nobody = INVOICE.c.id == 99
        assert session.execute(sa.update(INVOICE).where(nobody).values(state="x")).rowcount == 0
        assert session.execute(sa.delete(INVOICE).where(nobody)).rowcount == 0
        assert (
            session.execute(sa.update(Invoice).where(Invoice.state == "none").values(state="x")).rowcount == 0
        )
        session.commit()


def test_a_missing_row_is_the_orm_s_own_error_for_a_flush(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.get(Invoice, 1).state = "paid"
        with unguarded(session, reason="to have it gone"), session.no_autoflush:
            session.execute(sa.delete(INVOICE))
        with pytest.raises(StaleDataError):
            session.flush()


def test_a_missing_row_is_the_orm_s_own_warning_for_a_delete(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.delete(session.get(Invoice, 1))
        with unguarded(session, reason="to have it gone"), session.no_autoflush:
            session.execute(sa.delete(INVOICE))
        with pytest.warns(sa.exc.SAWarning, match="0 were matched"):
            session.commit()


# Another listener


@contextlib.contextmanager
def listener(engine: Engine, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Somebody else's `before_execute`, after the guard's."""

    def before_execute(connection, statement, multiparams, params, options) -> Any:
        return replace(statement), multiparams, params

    event.listen(engine, "before_execute", before_execute, retval=True)
    try:
        yield
    finally:
        event.remove(engine, "before_execute", before_execute)


def test_a_listener_that_drops_the_guard_is_caught(db: Db) -> None:
    db.overtake()

    def drop(statement: Any) -> Any:
        return sa.update(INVOICE).values(state="dropped") if statement.is_update else statement

    with sent(db.engine) as statements, listener(db.engine, drop):
        with Session(db.engine) as session, guarded(session, OLD):
            with pytest.raises(UnverifiableWrite, match="without its guard"):
                session.execute(PAY)
            assert statements == []
            with pytest.raises(UnverifiableWrite):
                session.commit()
    assert db.invoice() == ("newer", NEW.token)


@pytest.mark.parametrize("verb", ["insert", "delete"])
def test_a_listener_that_drops_the_guard_of_another_verb_is_caught(lite: Db, verb: str) -> None:
    build = {"insert": sa.insert(INVOICE).values(id=9, state="x"), "delete": sa.delete(INVOICE)}[verb]

    def drop(statement: Any) -> Any:
        return build if statement.is_dml else statement

    with listener(lite.engine, drop), lite.engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(UnverifiableWrite, match="without its guard"):
            connection.execute(build)
    assert lite.outside(sa.select(INVOICE.c.id)) == [(1,)]


def test_a_listener_that_keeps_the_guard_changes_nothing(db: Db) -> None:
    def comment(statement: Any) -> Any:
        return statement.prefix_with("/* traced */") if statement.is_dml else statement

    with listener(db.engine, comment), Session(db.engine) as session, guarded(session, OLD):
        session.execute(PAY)
        session.commit()
        db.overtake()
        with pytest.raises(StaleToken):
            session.execute(PAY)
    assert db.invoice() == ("newer", NEW.token)


def test_a_listener_that_comes_in_mid_transaction_hears_of_the_next_guarded_one(lite: Db) -> None:
    with Session(lite.engine) as session, guarded(session, OLD):
        session.get(Invoice, 1)
        with sent(lite.engine) as statements:
            session.commit()
            session.execute(PAY)
        assert [statement[:6] for statement in statements if not statement.startswith("BEGIN")] == ["UPDATE"]


def test_a_listener_on_one_guarded_connection_does_not_hear_of_others(lite: Db) -> None:
    heard: list[str] = []
    with lite.engine.connect() as connection, guarded(connection, OLD):
        event.listen(connection, "before_cursor_execute", lambda *args: heard.append(args[2]))
        connection.execute(PAY)
        connection.commit()
    before = list(heard)
    with Session(lite.engine) as session, guarded(session, OLD):
        session.execute(PAY)
        session.commit()
    assert before
    assert heard == before


def test_a_listener_on_a_connection_hears_of_guarded_statements(lite: Db) -> None:
    for order in ("listener first", "guard first"):
        heard: list[str] = []
        with lite.engine.connect() as connection, contextlib.ExitStack() as stack:
            if order == "guard first":
                stack.enter_context(guarded(connection, OLD))
            event.listen(
                connection, "before_cursor_execute", lambda *args, heard=heard: heard.append(args[2])
            )
            if order == "listener first":
                stack.enter_context(guarded(connection, OLD))
            connection.execute(PAY)
            connection.commit()
        assert [statement[:6] for statement in heard if not statement.startswith("BEGIN")] == ["UPDATE"], (
            order
        )


# Errors


def test_errors_cross_process_borders(lite: Db) -> None:
    lite.overtake()
    caught: list[Exception] = []
    with lite.engine.connect() as connection:
        for statement in (PAY, text(f"DELETE FROM {INVOICE.name}")):
            with guarded(connection, OLD):
                try:
                    connection.execute(statement)
                except (StaleToken, UnverifiableWrite) as error:
                    caught.append(error)
                connection.rollback()
        try:
            connection.execute(PAY)
        except UnguardedWrite as error:
            caught.append(error)
    assert [type(error) for error in caught] == [StaleToken, UnverifiableWrite, UnguardedWrite]
    for error in caught:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


# The answer to a commit


@pytest.fixture
def line(proxy: Any, pg: Db) -> Any:
    return line_to(proxy, pg)


def line_to(proxy: Any, pg: Db) -> Any:
    """A way to the database on which answers can get lost."""
    url = make_url(pg.url)
    return proxy(url.host, url.port, resp=False)


def through(line: Any, pg: Db, driver: str) -> str:
    url = make_url(pg.url).set(drivername=driver, host=line.host, port=line.port)
    return url.render_as_string(hide_password=False)


def test_a_lost_answer_to_a_commit_is_an_unknown_outcome(pg: Db, line: Any, leases: FakeLeases) -> None:
    lease = leases.leases.acquire("invoice:1", ttl=30)
    engine = sa.create_engine(through(line, pg, "postgresql+psycopg"))
    with Session(engine) as session, guarded(session, lease):
        session.get(Invoice, 1).state = "paid"
        session.flush()
        line.close_on_reply(1)
        with pytest.raises(OutcomeUnknown) as unknown:
            session.commit()
        line.wait_for_lost(1)
        line.heal()
        session.rollback()
        assert session.get(Invoice, 1).state == "paid", "it had in fact been committed"
    error = unknown.value
    assert (error.resource, error.token, error.holder) == ("invoice:1", lease.token, lease.holder)
    assert "Read what was written" in str(error)
    assert pickle.loads(pickle.dumps(error)).token == lease.token
    [told] = leases.told.of(CommitUnknown)
    assert told.token == lease.token
    engine.dispose()


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg"])
def test_a_lost_answer_to_an_async_commit_is_an_unknown_outcome(pg: Db, line: Any, driver: str) -> None:
    async def work() -> None:
        engine = create_async_engine(through(line, pg, driver))
        async with AsyncSession(engine) as session:
            with guarded(session, OLD):
                await session.execute(PAY)
                line.close_on_reply(1)
                with pytest.raises(OutcomeUnknown):
                    await session.commit()
                line.heal()
                await session.rollback()
                assert (await session.get(Invoice, 1)).state == "paid"
        await engine.dispose()

    do(work)
    line.wait_for_lost(1)


def test_a_lost_answer_to_the_commit_of_a_connection_is_an_unknown_outcome(pg: Db, line: Any) -> None:
    engine = sa.create_engine(through(line, pg, "postgresql+psycopg"))
    with engine.connect() as connection, guarded(connection, OLD):
        connection.execute(PAY)
        line.close_on_reply(1)
        with pytest.raises(OutcomeUnknown):
            connection.commit()
        line.heal()
    with engine.connect() as connection:
        assert connection.scalar(sa.select(INVOICE.c.state)) == "paid"
    engine.dispose()


def test_a_lost_answer_to_a_commit_without_a_guard_is_the_driver_s_error(pg: Db, line: Any) -> None:
    engine = sa.create_engine(through(line, pg, "postgresql+psycopg"))
    install(engine)
    with engine.connect() as connection:
        connection.execute(sa.insert(Note), {"id": 1, "words": "unguarded"})
        line.close_on_reply(1)
        with pytest.raises(DBAPIError):
            connection.commit()
    engine.dispose()


def test_a_lost_answer_to_a_statement_is_the_driver_s_error(pg: Db, line: Any) -> None:
    engine = sa.create_engine(through(line, pg, "postgresql+psycopg"))
    with Session(engine) as session, guarded(session, OLD):
        session.get(Invoice, 1)
        line.close_on_reply(1)
        with pytest.raises(DBAPIError):
            session.execute(PAY)
    engine.dispose()
    assert pg.invoice() == ("open", 0)


def test_a_statement_that_fails_after_a_commit_is_not_an_unknown_outcome(pg: Db) -> None:
    with pg.engine.connect() as connection, guarded(connection, OLD):
        connection.execute(PAY)
        connection.commit()
        with pytest.raises(IntegrityError):
            connection.execute(sa.insert(INVOICE).values(id=1, state="there already"))


@pytest.fixture
def deferred(pg: Db) -> sa.Table:
    return deferred_table(pg)


def deferred_table(pg: Db) -> sa.Table:
    """A table whose rows must have an invoice, as only the commit finds out."""
    table = sa.Table(
        "scene_deferred",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "invoice_id",
            sa.ForeignKey(INVOICE.c.id, deferrable=True, initially="DEFERRED"),
        ),
    )
    pg.outside(sa.schema.CreateTable(table))
    return table


def test_a_commit_that_the_server_refused_is_known(pg: Db, deferred: sa.Table) -> None:
    with Session(pg.engine) as session, guarded(session, OLD):
        session.execute(PAY)
        session.execute(deferred.insert(), {"id": 1, "invoice_id": 99})
        with pytest.raises(IntegrityError):
            session.commit()
    assert pg.invoice() == ("open", 0)


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg"])
def test_an_async_commit_that_the_server_refused_is_known(pg: Db, deferred: sa.Table, driver: str) -> None:
    async def work() -> None:
        url = make_url(pg.url).set(drivername=driver).render_as_string(hide_password=False)
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session, guarded(session, OLD):
            await session.execute(PAY)
            await session.execute(deferred.insert(), {"id": 1, "invoice_id": 99})
            with pytest.raises(IntegrityError):
                await session.commit()
        await engine.dispose()

    do(work)
    assert pg.invoice() == ("open", 0)


def test_a_commit_that_sqlite_refused_is_known(lite: Db) -> None:
    engine = lite.another_engine()
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE TABLE scene_deferred (invoice_id INTEGER REFERENCES {INVOICE.name} (id) "
            "DEFERRABLE INITIALLY DEFERRED)"
        )
    with Session(engine) as session, guarded(session, OLD):
        session.execute(PAY)
        session.execute(text("INSERT INTO scene_deferred VALUES (99)"))
        with pytest.raises(IntegrityError):
            session.commit()
    assert lite.invoice() == ("open", 0)


# An application that has never heard of fencing


class Plain(DeclarativeBase): ...


tags = sa.Table(
    "plain_tags",
    Plain.metadata,
    sa.Column("book_id", sa.ForeignKey("plain_book.id"), primary_key=True),
    sa.Column("tag_id", sa.ForeignKey("plain_tag.id"), primary_key=True),
)


class Tag(Plain):
    __tablename__ = "plain_tag"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


class Work(Plain):
    __tablename__ = "plain_work"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    title: Mapped[str]
    version: Mapped[int] = mapped_column(default=1)


class Book(Work):
    __tablename__ = "plain_book"
    __mapper_args__ = {"polymorphic_identity": "book"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(sa.ForeignKey("plain_work.id"), primary_key=True)
    pages: Mapped[int]
    tags: Mapped[list[Tag]] = relationship(secondary=tags)


def a_day_of_business(engine: Engine) -> list[Any]:
    """Something of everything, and what came of it."""
    upsert = {"sqlite": sqlite, "postgresql": postgresql}[engine.dialect.name].insert(Tag)
    upsert = upsert.on_conflict_do_update(index_elements=["name"], set_={"name": upsert.excluded.name + "!"})
    seen: list[Any] = []
    with Session(engine) as session:
        red, blue = Tag(name="red"), Tag(name="blue")
        for n in range(3):
            session.add(Book(title=f"book {n}", pages=n, tags=[red]))
            session.flush()
        session.add(Work(title="a work"))
        session.commit()
        book = session.scalars(sa.select(Book).order_by(Book.id)).first()
        book.title, book.pages, book.tags = "renamed", 100, [blue]
        session.commit()
        seen += (
            session.execute(sa.update(Book).where(Book.pages < 2).values(pages=Book.pages + 1)).rowcount,
        )
        seen += (session.execute(sa.delete(tags).where(tags.c.tag_id == red.id)).rowcount,)
        seen += session.execute(sa.insert(Tag).returning(Tag.name), [{"name": "a"}, {"name": "b"}]).all()
        seen += session.execute(upsert.returning(Tag.name), {"name": "a"}).all()
        session.execute(sa.update(Work), [{"id": 1, "title": "bulk"}, {"id": 2, "title": "bulk"}])
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.add(Tag(name="blue"))
        session.execute(text("UPDATE plain_work SET title = title || '?' WHERE id = 3"))
        doomed = session.scalars(sa.select(Book).order_by(Book.id.desc())).first()
        session.delete(doomed)
        session.commit()
    with engine.begin() as connection:
        seen += connection.execute(sa.select(Work.__table__).order_by(Work.id)).all()
        seen += connection.execute(sa.select(Book.__table__).order_by(Book.__table__.c.id)).all()
        seen += connection.execute(sa.select(tags).order_by(*tags.c)).all()
        seen += connection.exec_driver_sql("SELECT name FROM plain_tag ORDER BY name").all()
    return seen


def recorded(engine: Engine) -> list[Any]:
    said: list[Any] = []
    event.listen(engine, "before_cursor_execute", lambda *args: said.append((args[2], args[3], args[5])))
    for ending in ("commit", "rollback", "savepoint"):
        event.listen(engine, ending, lambda *_, ending=ending: said.append(ending))
    said.append(a_day_of_business(engine))
    return said


def test_an_application_that_never_heard_of_fencing_notices_nothing(db: Db) -> None:
    maker, without = db.another_engine(), db.another_engine()
    Plain.metadata.create_all(maker)
    expected = recorded(without)
    Plain.metadata.drop_all(maker)
    Plain.metadata.create_all(maker)
    assert recorded(db.engine) == expected
    assert len(expected) > 30
    assert db.told.events == []


def test_a_guarded_session_sends_its_unfenced_writes_as_they_are(db: Db) -> None:
    without = db.another_engine()
    with sent(without) as plain, Session(without) as session:
        session.add(Note(id=1, words="plain"))
        session.commit()
    with sent(db.engine) as under_guard, Session(db.engine) as session, guarded(session, OLD):
        session.add(Note(id=2, words="under guard"))
        session.commit()
    assert under_guard == plain


def test_the_fence_is_there_when_asked_for(db: Db) -> None:
    with Session(db.engine) as session, guarded(session, OLD):
        session.get(Invoice, 1).state = "paid"
        session.commit()
        found = session.scalars(sa.select(Invoice).options(undefer(Invoice.fence_token))).one()
        assert (found.fence_token, found.fence_holder.hex) == (OLD.token, OLD.holder)


def test_a_table_that_is_declared_fenced_late_is_fenced_from_then_on(lite: Db) -> None:
    table = sa.Table("late", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), *bare_columns())
    with lite.engine.begin() as connection:
        table.create(connection)
        connection.execute(sa.insert(table), {"id": 1})
    fence(table)
    with lite.engine.begin() as connection, pytest.raises(UnguardedWrite):
        connection.execute(sa.insert(table), {"id": 2})


def bare_columns() -> list[sa.Column[Any]]:
    """The columns of a fence, before anybody says that they are one."""
    return [
        sa.Column("fence_token", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("fence_holder", sa.Uuid, nullable=False, server_default="0" * 32),
    ]
