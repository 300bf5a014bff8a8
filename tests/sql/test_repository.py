"""The guarded repository, on every driver: what it writes, what it says became of each row, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from guard_kit.databases import Database, Stamp
from guard_kit.models import Account, Engineer, Slot, Staff
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencing import ConfigurationError, Grant, RowMissing, StaleToken, UnguardedWrite, WrongResource
from fencing.sql import AsyncGuardedRepository, Fenced, GuardedRepository, Written, guarded, install

OLD, NEWER = Stamp(10, "0" * 31 + "a"), Stamp(30, "2" * 31 + "c")
GRANT = Grant("test", ("r",), "1" * 31 + "b", 20, 0.0)
ACCOUNTS = {
    Account.__table__: [{"id": n, "code": f"c{n}", "region": "north", "balance": n} for n in (1, 2, 3)]
}
ENGINEERS = {
    Staff.__table__: [{"id": 1, "kind": "engineer", "name": "ada"}],
    Engineer.__table__: [{"id": 1, "stack": "python"}],
}


def accounts(session: Session) -> GuardedRepository[Account]:
    return GuardedRepository(Account, session, GRANT)


def balances(database: Database) -> dict[int, int]:
    return {key[0]: row["balance"] for key, row in database.snapshot()["account"].items()}


def stamps(database: Database) -> dict[int, int]:
    return {key[0]: row["fence_token"] for key, row in database.snapshot()["account"].items()}


def doing(database: Database, work: Callable[[GuardedRepository[Account]], Any]) -> Any:
    """What a method of the repository answered, in a transaction of its own, committed."""
    answers: list[Any] = []

    def write(session: Session) -> None:
        answers.append(work(accounts(session)))
        session.commit()

    database.run(write)
    return answers[0]


@pytest.fixture
def seeded(database: Database) -> Database:
    database.seed(ACCOUNTS, lambda *_: OLD)
    return database


WRITES: dict[str, Callable[[GuardedRepository[Account]], Any]] = {
    "claim": lambda r: r.claim(1),
    "claim_many": lambda r: r.claim_many([1, 2]),
    "update": lambda r: r.update(1, balance=9),
    "update_many": lambda r: r.update_many([{"id": 1, "balance": 9}, {"id": 2, "balance": 9}]),
    "upsert": lambda r: r.upsert({"id": 1, "code": "c1", "region": "x", "balance": 9}),
    "upsert_many": lambda r: r.upsert_many(
        [{"id": n, "code": f"c{n}", "region": "x", "balance": 9} for n in (1, 2)]
    ),
    "delete": lambda r: r.delete(1),
    "delete_many": lambda r: r.delete_many([1, 2]),
    "save": lambda r: r.save(Account(id=1, code="c1", region="x", balance=9)),
    "save_many": lambda r: r.save_many([Account(id=1, code="c1", region="x", balance=9)]),
}


@pytest.mark.parametrize("name", WRITES)
def test_stale_holder_is_refused_by_every_method(database: Database, name: str) -> None:
    before = database.seed(ACCOUNTS, lambda *_: NEWER)
    with pytest.raises(StaleToken) as refused:
        doing(database, WRITES[name])
    assert (refused.value.stored_token, refused.value.table) == (30, "account")
    assert database.snapshot() == before


def test_one_row_is_updated_claimed_and_deleted(seeded: Database) -> None:
    assert doing(seeded, lambda r: r.update(1, balance=9, region="south")) == Written((1,), "updated")
    assert doing(seeded, lambda r: r.claim(2)) == Written((2,), "claimed")
    assert doing(seeded, lambda r: r.delete(3)) == Written((3,), "deleted")
    assert balances(seeded) == {1: 9, 2: 2}
    assert stamps(seeded) == {1: 20, 2: 20}


@pytest.mark.parametrize("method", ["update", "claim", "delete"])
def test_missing_row_is_said_to_be_missing_and_not_stale(seeded: Database, method: str) -> None:
    with pytest.raises(RowMissing) as missing:
        doing(seeded, lambda r: r.update(9, balance=1) if method == "update" else getattr(r, method)(9))
    assert (missing.value.table, missing.value.identity) == ("account", (9,))
    assert (missing.value.token, missing.value.holder, missing.value.resource) == (20, GRANT.holder, "r")


def test_many_rows_say_each_what_became_of_them(seeded: Database) -> None:
    rows = [{"id": n, "balance": 90 + n} for n in (1, 9, 2)]
    told = doing(seeded, lambda r: r.update_many(rows))
    assert told == [Written((1,), "updated"), Written((9,), "missing"), Written((2,), "updated")]
    assert balances(seeded) == {1: 91, 2: 92, 3: 3}
    assert doing(seeded, lambda r: r.claim_many([3, 9])) == [
        Written((3,), "claimed"),
        Written((9,), "missing"),
    ]
    assert doing(seeded, lambda r: r.delete_many([9, 1])) == [
        Written((9,), "missing"),
        Written((1,), "deleted"),
    ]
    assert stamps(seeded) == {2: 20, 3: 20}


def test_nothing_is_nothing(seeded: Database) -> None:
    for work in ("update_many", "upsert_many", "delete_many", "claim_many", "add_many", "save_many"):
        assert doing(seeded, lambda r, work=work: getattr(r, work)([])) == []


def test_upsert_inserts_and_updates(seeded: Database) -> None:
    rows = [{"id": n, "code": f"c{n}", "region": "x", "balance": 50 + n} for n in (3, 4)]
    assert doing(seeded, lambda r: r.upsert_many(rows)) == [
        Written((3,), "written"),
        Written((4,), "written"),
    ]
    assert balances(seeded) == {1: 1, 2: 2, 3: 53, 4: 54}
    assert stamps(seeded) == {1: 10, 2: 10, 3: 20, 4: 20}
    by_code = {"id": 1, "code": "c1", "region": "y", "balance": 7}
    assert doing(seeded, lambda r: r.upsert(by_code, key=["code"])) == Written(("c1",), "written")
    assert balances(seeded)[1] == 7
    only_a_key = {"id": 2, "code": "c2", "region": "north"}
    assert (
        doing(seeded, lambda r: r.upsert(only_a_key, key=["id", "code", "region"][:1])).outcome == "written"
    )
    assert balances(seeded)[2] == 2


def test_objects_are_added_saved_and_read(seeded: Database) -> None:
    def work(session: Session) -> None:
        repository = accounts(session)
        new = repository.add(Account(id=4, code="c4", region="x", balance=4))
        assert new in session
        repository.add_many([Account(id=n, code=f"c{n}", region="x", balance=n) for n in (5, 6)])
        loaded = repository.get(1)
        assert loaded is not None
        loaded.balance = 11
        assert repository.save(loaded) is loaded
        detached = Account(id=2, code="c2", region="north", balance=22)
        assert repository.save(detached) is session.get(Account, 2)
        assert repository.get(99) is None
        session.commit()

    seeded.run(work)
    assert balances(seeded) == {1: 11, 2: 22, 3: 3, 4: 4, 5: 5, 6: 6}
    assert stamps(seeded) == {1: 20, 2: 20, 3: 10, 4: 20, 5: 20, 6: 20}


def test_what_is_loaded_follows_what_is_written(seeded: Database) -> None:
    def work(session: Session) -> None:
        repository = accounts(session)
        first = repository.get(1)
        assert first is not None
        repository.update(1, balance=9)
        assert first.balance == 9
        repository.upsert({"id": 1, "code": "c1", "region": "x", "balance": 10})
        session.refresh(first)
        assert first.balance == 10
        repository.delete(1)
        assert repository.get(1) is None
        session.commit()

    seeded.run(work)


def test_row_of_two_tables_is_written_as_one(database: Database) -> None:
    database.seed(ENGINEERS, lambda *_: OLD)

    def work(session: Session) -> None:
        engineers = GuardedRepository(Engineer, session, GRANT)
        assert engineers.update(1, name="grace", stack="cobol") == Written((1,), "updated")
        rows = [{"id": 1, "stack": "c"}, {"id": 2, "stack": "c"}]
        assert [each.outcome for each in engineers.update_many(rows)] == ["updated", "missing"]
        assert engineers.claim(1).outcome == "claimed"
        session.commit()

    database.run(work)
    snapshot = database.snapshot()
    assert (snapshot["staff"][1,]["name"], snapshot["engineer"][1,]["stack"]) == ("grace", "c")
    assert snapshot["staff"][1,]["fence_token"] == 20

    def leave(session: Session) -> None:
        assert GuardedRepository(Engineer, session, GRANT).delete(1).outcome == "deleted"
        session.commit()

    database.run(leave)
    assert database.snapshot()["staff"] == database.snapshot()["engineer"] == {}


def test_composite_key_is_a_tuple(database: Database) -> None:
    rows = [{"room": "a", "at_hour": n, "who": "x"} for n in (1, 2)]
    database.seed({Slot.__table__: rows}, lambda *_: OLD)

    def work(session: Session) -> None:
        slots = GuardedRepository(Slot, session, GRANT)
        assert slots.update(("a", 1), guest="y") == Written(("a", 1), "updated")
        assert [each.outcome for each in slots.claim_many([("a", 1), ("b", 1)])] == ["claimed", "missing"]
        assert slots.upsert({"room": "a", "hour": 3, "guest": "z"}).identity == ("a", 3)
        assert [each.outcome for each in slots.delete_many([("a", 2), ("b", 2)])] == ["deleted", "missing"]
        with pytest.raises(ConfigurationError, match="a key of 2 values"):
            slots.update("a", guest="y")
        session.commit()

    database.run(work)
    guests = {key: row["who"] for key, row in database.snapshot()["slot"].items()}
    assert guests == {("a", 1): "y", ("a", 3): "z"}


# Without a server to look at


class Base(DeclarativeBase):
    pass


class Invoice(Fenced, Base):
    __tablename__ = "repository_invoice"
    __fence_resource__ = "invoice:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Plain(Base):
    __tablename__ = "repository_plain"
    id: Mapped[int] = mapped_column(primary_key=True)


class Invoices(GuardedRepository[Invoice]):
    """What a user adds."""

    def __init__(self, session: Session, lease: Grant | None = None) -> None:
        super().__init__(Invoice, session, lease)

    def pay(self, identity: int) -> None:
        with self.guarding() as session:
            session.execute(sa.update(Invoice).where(Invoice.id == identity).values(state="paid"))


def on(*resources: str) -> Grant:
    return Grant("test", resources, "1" * 31 + "b", 20, 0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/repository.db")
    Base.metadata.create_all(engine)
    install(engine)
    yield engine
    engine.dispose()


def test_methods_of_ones_own_are_guarded(engine: sa.Engine) -> None:
    with Session(engine) as session:
        invoices = Invoices(session, on("invoice:1"))
        invoices.add(Invoice(id=1, state="open"))
        invoices.pay(1)
        session.commit()
        assert session.get_one(Invoice, 1).state == "paid"


def test_several_resources_are_written_at_once_and_others_are_not(engine: sa.Engine) -> None:
    with Session(engine) as session:
        invoices = Invoices(session, on("invoice:1", "invoice:2"))
        invoices.upsert_many([{"id": 1, "state": "a"}, {"id": 2, "state": "a"}])
        invoices.update_many([{"id": 1, "state": "b"}, {"id": 2, "state": "b"}])
        assert [each.outcome for each in invoices.delete_many([1, 2])] == ["deleted", "deleted"]
        session.commit()
        for work in (
            lambda: invoices.update(3, state="x"),
            lambda: invoices.claim(3),
            lambda: invoices.delete(3),
            lambda: invoices.upsert({"id": 3, "state": "x"}),
            lambda: invoices.add(Invoice(id=3, state="x")),
        ):
            with pytest.raises(WrongResource) as wrong:
                work()
            assert wrong.value.identity == (3,)
            session.rollback()


def test_session_that_is_guarded_needs_no_lease(engine: sa.Engine) -> None:
    with Session(engine) as session:
        with guarded(session, on("invoice:1")):
            invoices = Invoices(session)
            invoices.upsert({"id": 1, "state": "open"})
            with pytest.raises(RowMissing):
                Invoices(session).delete_many([1])
                Invoices(session).delete(1)
            session.commit()
        with pytest.raises(UnguardedWrite):
            invoices.upsert({"id": 1, "state": "open"})


def test_calls_that_are_wrong_say_so(engine: sa.Engine) -> None:
    with Session(engine) as session:
        with pytest.raises(ConfigurationError, match="Plain is not fenced"):
            GuardedRepository(Plain, session, on("invoice:1"))
        invoices = Invoices(session, on("invoice:1"))
        with pytest.raises(ConfigurationError, match="names its primary key"):
            invoices.update_many([{"state": "x"}])
        with pytest.raises(ConfigurationError, match="gives its key"):
            invoices.upsert({"state": "x"})
        with pytest.raises(ConfigurationError, match="the same columns"):
            invoices.upsert_many([{"id": 1, "state": "x"}, {"id": 2}])
        for wrong in (
            lambda: invoices.update(1, stat="typo"),
            lambda: invoices.update_many([{"id": 1, "stat": "typo"}]),
            lambda: invoices.upsert({"id": 1, "stat": "typo"}),
        ):
            with pytest.raises(ConfigurationError, match="no column attribute 'stat'"):
                wrong()
        with pytest.raises(ConfigurationError, match="is the primary key"):
            invoices.update(1, id=2)
        with pytest.raises(ConfigurationError, match="a SQL expression"):
            invoices.update_many([{"id": 1, "state": sa.func.upper(Invoice.state)}])
        for identity in (None, Invoice(id=1)):
            with pytest.raises(ConfigurationError, match="a key of 1 values"):
                invoices.update(identity, state="x")


def test_one_row_is_updated_by_an_expression(engine: sa.Engine) -> None:
    with Session(engine) as session:
        invoices = Invoices(session, on("invoice:1"))
        invoices.add(Invoice(id=1, state="open"))
        assert invoices.update(1, state=sa.func.upper(Invoice.state)).outcome == "updated"
        session.commit()
        assert session.get_one(Invoice, 1).state == "OPEN"


def test_async_twin_does_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/twin.db")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        install(engine)
        both = on("invoice:1", "invoice:2")
        async with AsyncSession(engine) as session:
            invoices = AsyncGuardedRepository(Invoice, session, both)
            await invoices.add(Invoice(id=1, state="a"))
            await invoices.add_many([Invoice(id=2, state="a")])
            assert await invoices.update(1, state="b") == Written((1,), "updated")
            assert len(await invoices.update_many([{"id": 2, "state": "b"}])) == 1
            assert (await invoices.upsert({"id": 1, "state": "c"})).outcome == "written"
            assert len(await invoices.upsert_many([{"id": 1, "state": "c"}])) == 1
            assert (await invoices.claim(1)).outcome == "claimed"
            assert len(await invoices.claim_many([1, 2])) == 2
            found = await invoices.get(1)
            assert found is not None
            await session.refresh(found)
            found.state = "d"
            await invoices.save(found)
            await invoices.save_many([found])
            with invoices.guarding() as same:
                assert same is session
            async with invoices.guarding() as same:
                assert same is session
            assert (await invoices.delete(1)).outcome == "deleted"
            assert len(await invoices.delete_many([2])) == 1
            await session.commit()
        await engine.dispose()

    asyncio.run(main())
