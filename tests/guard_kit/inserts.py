"""Shapes of INSERT: at row level nothing there can be stale, so new rows are stamped and no more."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from guard_kit.models import (
    Account,
    Basket,
    Engineer,
    Gauge,
    Note,
    Parcel,
    Slot,
    Staff,
    Tag,
    Vault,
    Visit,
    meter,
)
from guard_kit.shape import shape
from guard_kit.worlds import (
    ACCOUNTS,
    ACCOUNTS_AND_NOTES,
    BASKETS,
    GAUGES,
    METERS,
    SLOTS,
    STAFF,
    TAGGED,
    VAULTS,
)

account = Account.__table__
NINE = {"id": 9, "code": "i", "region": "east", "balance": 9}
TEN = {"id": 10, "code": "j", "region": "east", "balance": 10}
NOT_MINE = {"fence_token": 999, "fence_holder": UUID(int=7)}


@shape(ACCOUNTS, adds={Account: 1})
def object_added(session: Session) -> None:
    session.add(Account(**NINE))


@shape(ACCOUNTS, adds={Account: 2})
def objects_added(session: Session) -> None:
    session.add_all([Account(**NINE), Account(**TEN)])


@shape(ACCOUNTS, adds={Account: 1})
def object_added_with_a_fence_of_its_own(session: Session) -> None:
    session.add(Account(**NINE, **NOT_MINE))


@shape({}, adds={Visit: 3})
def objects_added_whose_keys_the_database_makes(session: Session) -> None:
    visits = [Visit(page=page) for page in ("one", "two", "three")]
    session.add_all(visits)
    session.flush()
    assert len({visit.id for visit in visits}) == 3


@shape(SLOTS, adds={Slot: 1})
def composite_key_object_added(session: Session) -> None:
    session.add(Slot(room="red", hour=10, guest="eve"))


@shape(VAULTS, adds={Vault: 2})
def objects_added_in_a_translated_schema(session: Session) -> None:
    session.connection(execution_options={"schema_translate_map": session.info["schemas"]})
    session.add_all([Vault(id=9, content="lead"), Vault(id=10, content="lead")])


@shape(STAFF, adds={Staff: 2})
def subclass_objects_added(session: Session) -> None:
    session.add_all([Engineer(id=9, name="eve", stack="rust"), Engineer(id=10, name="fay", stack="rust")])


@shape(BASKETS, adds={Parcel: 1})
def child_added_to_its_parent(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.parcels.append(Parcel(id=9))


@shape(TAGGED, adds={Basket: 1, Tag: 1})
def objects_added_that_are_joined_to_each_other(session: Session) -> None:
    session.add(Basket(id=9, title="new", tags=[Tag(id=9, word="new")]))


@shape(GAUGES, adds={Gauge: 2})
def objects_added_with_eager_defaults(session: Session) -> None:
    session.add_all([Gauge(id=9, level=1), Gauge(id=10, level=2)])


@shape(ACCOUNTS, adds={Account: 1})
def insert_of_values(session: Session) -> None:
    session.execute(insert(Account).values(NINE))


@shape(ACCOUNTS, adds={Account: 2})
def insert_of_a_list_of_values(session: Session) -> None:
    session.execute(insert(Account).values([NINE, TEN]))


@shape(ACCOUNTS, adds={Account: 1})
def insert_of_values_that_name_the_fence(session: Session) -> None:
    session.execute(insert(Account).values({**NINE, **NOT_MINE}))


@shape(ACCOUNTS, adds={Account: 2})
def insert_of_a_list_of_values_that_name_the_fence(session: Session) -> None:
    session.execute(insert(Account).values([{**NINE, **NOT_MINE}, {**TEN, **NOT_MINE}]))


@shape(ACCOUNTS, adds={Account: 2})
def bulk_insert(session: Session) -> None:
    session.execute(insert(Account), [NINE, TEN])


@shape(ACCOUNTS, adds={Account: 2})
def bulk_insert_that_names_the_fence(session: Session) -> None:
    session.execute(insert(Account), [{**NINE, **NOT_MINE}, {**TEN, **NOT_MINE}])


@shape(ACCOUNTS, adds={Account: 2})
def bulk_insert_returning(session: Session) -> None:
    made = session.scalars(insert(Account).returning(Account), [NINE, TEN]).all()
    assert sorted(account.id for account in made) == [9, 10]


@shape(STAFF, adds={Staff: 2})
def bulk_insert_of_a_subclass(session: Session) -> None:
    session.execute(
        insert(Engineer),
        [{"id": 9, "name": "eve", "stack": "rust"}, {"id": 10, "name": "fay", "stack": "rust"}],
    )


@shape(ACCOUNTS, adds={Account: 2})
def bulk_insert_by_mappings(session: Session) -> None:
    session.bulk_insert_mappings(Account, [NINE, TEN])


@shape(ACCOUNTS, adds={Account: 2})
def bulk_save_of_new_objects(session: Session) -> None:
    session.bulk_save_objects([Account(**NINE), Account(**TEN)])


@shape(ACCOUNTS, adds={Account: 1})
def core_insert(session: Session) -> None:
    session.connection().execute(account.insert().values(NINE))


@shape(ACCOUNTS, adds={Account: 1})
def core_insert_that_names_the_fence(session: Session) -> None:
    session.connection().execute(account.insert().values({**NINE, **NOT_MINE}))


@shape(ACCOUNTS, adds={Account: 2})
def core_insert_many_that_name_the_fence(session: Session) -> None:
    session.connection().execute(account.insert(), [{**NINE, **NOT_MINE}, {**TEN, **NOT_MINE}])


@shape(ACCOUNTS, adds={Account: 1})
def core_insert_of_one_set_of_parameters(session: Session) -> None:
    session.connection().execute(account.insert(), NINE)


@shape(ACCOUNTS, adds={Account: 2})
def core_insert_many(session: Session) -> None:
    session.connection().execute(account.insert(), [NINE, TEN])


@shape(METERS, adds={meter: 2})
def core_insert_into_a_table_that_is_not_mapped(session: Session) -> None:
    session.connection().execute(meter.insert(), [{"id": 9, "reading": 1}, {"id": 10, "reading": 2}])


@shape(ACCOUNTS, adds={Account: 1})
def core_insert_returning(session: Session) -> None:
    statement = account.insert().values(NINE).returning(account.c.id, account.c.fence_token)
    assert session.connection().execute(statement).scalar_one() == 9


@shape(ACCOUNTS, adds={Account: 2})
def core_insert_many_returning(session: Session) -> None:
    result = session.connection().execute(account.insert().returning(account.c.id), [NINE, TEN])
    assert sorted(result.scalars()) == [9, 10]


@shape(ACCOUNTS_AND_NOTES, adds={Account: 2})
def insert_from_select(session: Session) -> None:
    source = select(Note.id + 100, Note.body, sa.literal("east"), sa.literal(7))
    session.execute(insert(Account).from_select(["id", "code", "region", "balance"], source))


@shape(ACCOUNTS_AND_NOTES, adds={Account: 2})
def insert_from_a_grouped_select(session: Session) -> None:
    source = select(Note.id + 100, Note.body, sa.func.max(Note.body)).group_by(Note.id, Note.body)
    session.execute(insert(Account).from_select(["id", "code", "region"], source))


@shape(ACCOUNTS, adds={Account: 1})
def lambda_insert(session: Session) -> None:
    session.execute(sa.lambda_stmt(lambda: insert(Account).values(id=9, code="i", region="east", balance=9)))
