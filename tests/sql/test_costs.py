"""What the guard sends, counted: batches stay batches, success costs no read, tokens fill no cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fencing import Grant, StaleToken
from fencing.sql import Fenced, GuardedRepository, guarded, install


class Base(orm.DeclarativeBase):
    pass


class Row(Fenced, Base):
    __tablename__ = "counted"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    value: orm.Mapped[int]


def grant(token: int, holder: str = "a") -> Grant:
    return Grant("test", ("row",), holder * 32, token, 0.0)


def seed(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(Row.__table__), [{"id": n, "value": 0} for n in range(1, 101)])


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url)
    seed(engine)
    install(engine)
    yield engine
    engine.dispose()


def sent_by(engine: sa.Engine) -> list[str]:
    """What is sent from now on: the verb, and whether it is a batch."""
    sent: list[str] = []

    @sa.event.listens_for(engine, "do_execute")
    def one(cursor, statement: str, parameters, context) -> None:
        sent.append(statement.split()[0])

    @sa.event.listens_for(engine, "do_executemany")
    def many(cursor, statement: str, parameters, context) -> None:
        sent.append(f"{statement.split()[0]} x {len(parameters)}")

    return sent


def change_all(session: orm.Session) -> None:
    for row in session.scalars(sa.select(Row)):
        row.value += 1


def delete_all(session: orm.Session) -> None:
    for row in session.scalars(sa.select(Row)):
        session.delete(row)


WRITES: dict[str, tuple[Callable[[orm.Session], object], list[str]]] = {
    "flush of 100": (change_all, ["SELECT", "UPDATE x 100"]),
    "delete of 100": (delete_all, ["SELECT", "DELETE x 100"]),
    "one row": (lambda s: setattr(s.get(Row, 1), "value", 5), ["SELECT", "UPDATE"]),
    "bulk by key": (
        lambda s: s.execute(sa.update(Row), [{"id": n, "value": n} for n in range(1, 101)]),
        ["UPDATE x 100"],
    ),
    "criteria by key": (lambda s: s.execute(sa.update(Row).where(Row.id == 1).values(value=5)), ["UPDATE"]),
    "criteria": (
        lambda s: s.execute(
            sa.update(Row).where(Row.value == 0).values(value=5),
            execution_options={"synchronize_session": False},
        ),
        ["UPDATE", "SELECT"],
    ),
    "upsert": (
        lambda s: s.execute(
            insert(Row).on_conflict_do_update(index_elements=["id"], set_={"value": 9}),
            [{"id": n, "value": n} for n in range(1, 101)],
        ),
        ["INSERT x 100"],
    ),
    "repository update": (lambda s: GuardedRepository(Row, s).update(1, value=5), ["UPDATE"]),
    "repository claim": (lambda s: GuardedRepository(Row, s).claim(1), ["UPDATE"]),
    "repository upsert": (lambda s: GuardedRepository(Row, s).upsert({"id": 1, "value": 5}), ["INSERT"]),
    "repository delete": (lambda s: GuardedRepository(Row, s).delete(1), ["DELETE"]),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_sent_is_this(engine: sa.Engine, name: str) -> None:
    write, expected = WRITES[name]
    sent = sent_by(engine)
    with orm.Session(engine) as session, guarded(session, grant(10)):
        write(session)
        session.commit()
    assert sent == expected


def test_failure_pays_one_read(engine: sa.Engine) -> None:
    with orm.Session(engine) as session, guarded(session, grant(20, "b")):
        session.get_one(Row, 50).value = 1
        session.commit()
    with orm.Session(engine) as session, guarded(session, grant(10)):
        change_all(session)
        sent = sent_by(engine)
        with pytest.raises(StaleToken) as refused:
            session.commit()
    assert sent == ["UPDATE x 100", "SELECT"]
    assert refused.value.identity == (50,)


def test_batch_that_asyncpg_cannot_count_is_verified_by_one_read(
    engine: sa.Engine, database_url: str
) -> None:
    async def main() -> list[str]:
        asynchronous = create_async_engine(sa.make_url(database_url).set(drivername="postgresql+asyncpg"))
        install(asynchronous)
        async with asynchronous.connect():
            pass  # the first connection asks the server who it is
        sent = sent_by(asynchronous.sync_engine)
        async with AsyncSession(asynchronous) as session, guarded(session, grant(10)):
            await session.run_sync(change_all)
            await session.commit()
        await asynchronous.dispose()
        return sent

    assert asyncio.run(main()) == ["SELECT", "UPDATE x 100", "SELECT"]


def test_compiled_cache_does_not_grow_with_tokens(engine: sa.Engine) -> None:
    mapper_cache = sa.inspect(Row)._compiled_cache
    sizes = []
    for token in range(1, 60):
        with orm.Session(engine) as session, guarded(session, grant(token)):
            session.get_one(Row, 1).value = token
            session.flush()
            session.execute(sa.update(Row).where(Row.id == 2).values(value=token))
            session.execute(
                insert(Row)
                .values(id=3, value=1)
                .on_conflict_do_update(index_elements=["id"], set_={"value": 9})
            )
            session.commit()
        sizes.append((len(engine._compiled_cache or ()), len(mapper_cache)))
    assert len(set(sizes[3:])) == 1, sizes
