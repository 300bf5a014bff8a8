"""Shapes of upserts: ON CONFLICT on PostgreSQL and SQLite, ON DUPLICATE KEY on MariaDB."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import Session

from guard_kit.models import Account, Badge, Engineer, Slot, Staff, meter
from guard_kit.shape import shape
from guard_kit.worlds import ACCOUNTS, BADGES, MANY, MANY_METERS, SLOTS, STAFF

account = Account.__table__
ONE = {"id": 1, "code": "a", "region": "east", "balance": 98}
TWO = {"id": 2, "code": "b", "region": "east", "balance": 99}
NINE = {"id": 9, "code": "i", "region": "east", "balance": 9}
NOT_MINE = {"fence_token": 999, "fence_holder": UUID(int=7)}


def _insert(session: Session, into: Any = Account) -> Any:
    """The dialect's own insert(); where it has no ON CONFLICT, PostgreSQL's, which does not compile there."""
    made = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    return made(into)


def _by_id(statement: Any, **options: Any) -> Any:
    new = statement.excluded
    set_ = {"region": new.region, "balance": new.balance}
    return statement.on_conflict_do_update(index_elements=["id"], set_=set_, **options)


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_that_meets_a_row(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account).values(ONE)))


@shape(ACCOUNTS, adds={Account: 1})
def upsert_that_meets_none(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account).values(NINE)))


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_of_one_set_of_parameters(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account)), ONE)


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def upsert_of_a_list_of_values(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account).values([ONE, NINE, TWO])))


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def upsert_many(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account)), [ONE, NINE, TWO])


@shape(MANY_METERS, writes={meter: range(1, MANY)})
def upsert_hundreds(session: Session) -> None:
    statement = _insert(session, meter)
    set_ = {"reading": statement.excluded.reading}
    session.connection().execute(
        statement.on_conflict_do_update(index_elements=["id"], set_=set_),
        [{"id": at, "reading": at * 2} for at in range(1, MANY)],
    )


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_returning(session: Session) -> None:
    statement = _by_id(_insert(session, account).values(ONE)).returning(account.c.id)
    assert session.connection().execute(statement).scalar_one() == 1


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def upsert_many_returning(session: Session) -> None:
    statement = _by_id(_insert(session, account)).returning(account.c.id)
    assert sorted(session.connection().execute(statement, [ONE, NINE, TWO]).scalars()) == [1, 2, 9]


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def orm_upsert(session: Session) -> None:
    session.execute(_by_id(_insert(session)), [ONE, NINE, TWO])


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def orm_upsert_of_values(session: Session) -> None:
    session.execute(_by_id(_insert(session).values([ONE, NINE, TWO])))


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def orm_upsert_returning(session: Session) -> None:
    session.scalars(sa.select(Account)).all()
    statement = _by_id(_insert(session)).returning(Account)
    found = session.scalars(statement, [ONE, NINE, TWO], execution_options={"populate_existing": True})
    assert {account.id: account.balance for account in found} == {1: 98, 2: 99, 9: 9}


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_with_a_condition(session: Session) -> None:
    statement = _by_id(_insert(session, account).values(ONE), where=account.c.balance < 150)
    session.connection().execute(statement)


@shape(ACCOUNTS, writes={Account: [1]}, adds={Account: 1}, spares={Account: [2]})
def upsert_with_a_condition_that_spares_a_row(session: Session) -> None:
    statement = _by_id(_insert(session, account), where=account.c.balance < 150)
    session.connection().execute(statement, [ONE, NINE, TWO])


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_by_a_unique_column(session: Session) -> None:
    statement = _insert(session, account).values({**ONE, "id": 77})
    set_ = {"balance": statement.excluded.balance}
    session.connection().execute(statement.on_conflict_do_update(index_elements=["code"], set_=set_))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def upsert_many_by_a_unique_column(session: Session) -> None:
    statement = _insert(session, account)
    set_ = {"balance": statement.excluded.balance}
    session.connection().execute(
        statement.on_conflict_do_update(index_elements=[account.c.code], set_=set_),
        [{**ONE, "id": 77}, {**TWO, "id": 78}],
    )


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_by_a_named_constraint(session: Session) -> None:
    statement = _insert(session, account).values({**ONE, "id": 77})
    set_ = {"balance": statement.excluded.balance}
    session.connection().execute(statement.on_conflict_do_update(constraint="account_code_once", set_=set_))


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_that_sets_the_fence(session: Session) -> None:
    statement = _insert(session, account).values({**ONE, **NOT_MINE})
    set_ = {"balance": statement.excluded.balance, **NOT_MINE}
    session.connection().execute(statement.on_conflict_do_update(index_elements=["id"], set_=set_))


@shape(ACCOUNTS, adds={Account: 1})
def upsert_that_meets_none_and_names_the_fence(session: Session) -> None:
    session.connection().execute(_by_id(_insert(session, account).values({**NINE, **NOT_MINE})))


@shape(ACCOUNTS, writes={Account: [1]}, adds={Account: 1})
def upsert_many_that_name_the_fence(session: Session) -> None:
    session.connection().execute(
        _by_id(_insert(session, account)), [{**ONE, **NOT_MINE}, {**NINE, **NOT_MINE}]
    )


@shape(ACCOUNTS, writes={Account: [1]})
def upsert_that_sets_the_fence_by_column(session: Session) -> None:
    statement = _insert(session, account).values(ONE)
    set_ = {account.c.balance: statement.excluded.balance, account.c.fence_token: 999}
    session.connection().execute(statement.on_conflict_do_update(index_elements=["id"], set_=set_))


@shape(SLOTS, writes={Slot: [("blue", 9)]}, adds={Slot: 1})
def upsert_of_a_composite_key(session: Session) -> None:
    statement = _insert(session, Slot.__table__)
    session.connection().execute(
        statement.on_conflict_do_update(
            index_elements=["room", "at_hour"], set_={"who": statement.excluded.who}
        ),
        [{"room": "blue", "at_hour": 9, "who": "eve"}, {"room": "red", "at_hour": 10, "who": "eve"}],
    )


@shape(BADGES, writes={Badge: ["x", "y"]})
def upsert_many_of_a_converted_key(session: Session) -> None:
    statement = _insert(session, Badge.__table__)
    set_ = {"level": statement.excluded.level}
    session.connection().execute(
        statement.on_conflict_do_update(index_elements=["id"], set_=set_),
        [{"id": "x", "level": 8}, {"id": "y", "level": 9}],
    )


@shape(STAFF, writes={Staff: [1]})
def upsert_of_a_subclass_table(session: Session) -> None:
    statement = _insert(session, Engineer.__table__).values(id=1, stack="rust")
    set_ = {"stack": statement.excluded.stack}
    session.connection().execute(statement.on_conflict_do_update(index_elements=["id"], set_=set_))


@shape(ACCOUNTS, adds={Account: 1})
def insert_that_does_nothing_where_it_meets_a_row(session: Session) -> None:
    statement = _insert(session, account).values([ONE, NINE])
    session.connection().execute(statement.on_conflict_do_nothing(index_elements=["id"]))


@shape(ACCOUNTS, adds={Account: 1})
def insert_many_that_do_nothing_where_they_meet_a_row(session: Session) -> None:
    session.execute(_insert(session).on_conflict_do_nothing(), [ONE, NINE])


# MariaDB


def _on_duplicate(into: Any = account) -> Any:
    statement = mysql.insert(into)
    new = statement.inserted
    return statement.on_duplicate_key_update(region=new.region, balance=new.balance)


@shape(ACCOUNTS, writes={Account: [1]})
def on_duplicate_key_that_meets_a_row(session: Session) -> None:
    session.connection().execute(_on_duplicate().values(ONE))


@shape(ACCOUNTS, adds={Account: 1})
def on_duplicate_key_that_meets_none(session: Session) -> None:
    session.connection().execute(_on_duplicate().values(NINE))


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def on_duplicate_key_of_a_list_of_values(session: Session) -> None:
    session.connection().execute(_on_duplicate().values([ONE, NINE, TWO]))


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def on_duplicate_key_many(session: Session) -> None:
    session.connection().execute(_on_duplicate(), [ONE, NINE, TWO])


@shape(ACCOUNTS, writes={Account: [1]})
def on_duplicate_key_returning(session: Session) -> None:
    statement = _on_duplicate().values(ONE).returning(account.c.id)
    assert session.connection().execute(statement).scalar_one() == 1


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def on_duplicate_key_many_returning(session: Session) -> None:
    statement = _on_duplicate().returning(account.c.id)
    assert sorted(session.connection().execute(statement, [ONE, NINE, TWO]).scalars()) == [1, 2, 9]


@shape(ACCOUNTS, writes={Account: [1, 2]}, adds={Account: 1})
def orm_on_duplicate_key(session: Session) -> None:
    session.execute(_on_duplicate(Account), [ONE, NINE, TWO])


@shape(STAFF, writes={Staff: [1]})
def on_duplicate_key_of_a_subclass_table(session: Session) -> None:
    statement = mysql.insert(Engineer.__table__).values(id=1, stack="rust")
    session.connection().execute(statement.on_duplicate_key_update(stack=statement.inserted.stack))


@shape(ACCOUNTS, writes={Account: [1]})
def on_duplicate_key_by_a_unique_column(session: Session) -> None:
    session.connection().execute(_on_duplicate().values({**ONE, "id": 77}))


@shape(ACCOUNTS, writes={Account: [1]})
def on_duplicate_key_in_a_given_order(session: Session) -> None:
    statement = mysql.insert(account).values(ONE)
    ordered = [("fence_token", 999), ("balance", statement.inserted.balance), ("region", "east")]
    session.connection().execute(statement.on_duplicate_key_update(ordered))


@shape(ACCOUNTS, writes={Account: [1]})
def on_duplicate_key_from_the_old_value(session: Session) -> None:
    statement = mysql.insert(account).values(ONE)
    added = account.c.balance + statement.inserted.balance
    session.connection().execute(statement.on_duplicate_key_update(balance=added))
