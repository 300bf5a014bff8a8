"""Shapes of Core: statements on tables, through the session's connection."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.orm import Session

from guard_kit.models import Account, Note, Slot, Vault, meter
from guard_kit.shape import shape
from guard_kit.worlds import ACCOUNTS, ACCOUNTS_AND_NOTES, MANY, MANY_METERS, METERS, SLOTS, VAULTS

account, note, slot, vault = (model.__table__ for model in (Account, Note, Slot, Vault))
SOMEBODY = UUID(int=7)


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_by_key(session: Session) -> None:
    session.connection().execute(account.update().where(account.c.id == 1).values(balance=99))


@shape(METERS, writes={meter: [1]})
def core_update_of_a_table_that_is_not_mapped(session: Session) -> None:
    session.connection().execute(meter.update().where(meter.c.id == 1).values(reading=99))


@shape(METERS, deletes={meter: [2, 3]})
def core_delete_from_a_table_that_is_not_mapped(session: Session) -> None:
    session.connection().execute(meter.delete().where(meter.c.reading > 5))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def core_update_by_criteria(session: Session) -> None:
    session.connection().execute(account.update().where(account.c.region == "north").values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def core_update_returning(session: Session) -> None:
    statement = account.update().where(account.c.region == "north").values(balance=99)
    found = session.connection().execute(statement.returning(account.c.id)).scalars().all()
    assert sorted(found) == [1, 2]


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_by_key_and_more(session: Session) -> None:
    where = sa.and_(account.c.id == 1, account.c.balance < 150)
    session.connection().execute(account.update().where(where).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 3]})
def core_update_by_alternatives(session: Session) -> None:
    where = sa.or_(account.c.id == 1, account.c.code == "c")
    session.connection().execute(account.update().where(where).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def core_update_many_by_key(session: Session) -> None:
    statement = account.update().where(account.c.id == bindparam("which")).values(balance=bindparam("new"))
    session.connection().execute(statement, [{"which": 1, "new": 98}, {"which": 2, "new": 99}])


@shape(ACCOUNTS, writes={Account: [1, 2, 3, 4]})
def core_update_many_by_criteria(session: Session) -> None:
    statement = (
        account.update().where(account.c.region == bindparam("where")).values(balance=bindparam("new"))
    )
    session.connection().execute(statement, [{"where": "north", "new": 98}, {"where": "south", "new": 99}])


@shape(MANY_METERS, writes={meter: range(1, MANY)})
def core_update_hundreds_by_key(session: Session) -> None:
    statement = meter.update().where(meter.c.id == bindparam("which")).values(reading=bindparam("new"))
    session.connection().execute(statement, [{"which": at, "new": at * 2} for at in range(1, MANY)])


@shape(SLOTS, writes={Slot: [("blue", 9), ("red", 9)]})
def core_update_many_by_composite_key(session: Session) -> None:
    where = sa.and_(slot.c.room == bindparam("in_room"), slot.c.at_hour == bindparam("hour"))
    session.connection().execute(
        slot.update().where(where).values(who=bindparam("guest")),
        [{"in_room": "blue", "hour": 9, "guest": "eve"}, {"in_room": "red", "hour": 9, "guest": "fay"}],
    )


@shape(SLOTS, writes={Slot: [("blue", 9), ("red", 9)]})
def core_update_by_tuples(session: Session) -> None:
    where = sa.tuple_(slot.c.room, slot.c.at_hour).in_([("blue", 9), ("red", 9)])
    session.connection().execute(slot.update().where(where).values(who="eve"))


@shape(SLOTS, writes={Slot: [("blue", 9), ("red", 9)]})
def core_update_by_half_of_a_composite_key(session: Session) -> None:
    session.connection().execute(slot.update().where(slot.c.at_hour == 9).values(who="eve"))


@shape(ACCOUNTS, deletes={Account: [1]})
def core_delete_by_key(session: Session) -> None:
    session.connection().execute(account.delete().where(account.c.id == 1))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def core_delete_by_criteria(session: Session) -> None:
    session.connection().execute(account.delete().where(account.c.region == "north"))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def core_delete_many_by_key(session: Session) -> None:
    statement = account.delete().where(account.c.id == bindparam("which"))
    session.connection().execute(statement, [{"which": 1}, {"which": 2}])


@shape(ACCOUNTS, deletes={Account: [1, 2, 3, 4]})
def core_delete_of_all(session: Session) -> None:
    session.connection().execute(account.delete())


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1, 2]})
def core_update_from_another_table(session: Session) -> None:
    statement = account.update().where(account.c.id == note.c.id).values(region=note.c.body)
    session.connection().execute(statement)


@shape(ACCOUNTS_AND_NOTES, deletes={Account: [1, 2]})
def core_delete_using_another_table(session: Session) -> None:
    session.connection().execute(account.delete().where(account.c.id == note.c.id))


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1]})
def core_update_by_key_and_another_table(session: Session) -> None:
    where = sa.and_(account.c.id == 1, note.c.id == account.c.id + 1)
    session.connection().execute(account.update().where(where).values(region=note.c.body))


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_of_an_alias(session: Session) -> None:
    other = account.alias("other")
    session.connection().execute(sa.update(other).where(other.c.id == 1).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def core_update_of_an_alias_by_criteria(session: Session) -> None:
    other = account.alias("other")
    session.connection().execute(sa.update(other).where(other.c.region == "north").values(balance=99))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def core_delete_from_an_alias(session: Session) -> None:
    other = account.alias("other")
    session.connection().execute(sa.delete(other).where(other.c.region == "north"))


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_in_a_given_order(session: Session) -> None:
    statement = account.update().where(account.c.id == 1)
    ordered = statement.ordered_values((account.c.region, "east"), (account.c.balance, 99))
    session.connection().execute(ordered)


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_that_sets_the_fence(session: Session) -> None:
    values = {"balance": 99, "fence_token": 999, "fence_holder": SOMEBODY}
    session.connection().execute(account.update().where(account.c.id == 1).values(values))


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_that_sets_the_fence_to_an_expression(session: Session) -> None:
    values = {account.c.balance: 99, account.c.fence_token: account.c.fence_token + 500}
    session.connection().execute(account.update().where(account.c.id == 1).values(values))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def core_update_many_that_set_the_fence(session: Session) -> None:
    statement = account.update().where(account.c.id == bindparam("which"))
    session.connection().execute(
        statement,
        [
            {"which": 1, "balance": 98, "fence_token": 999, "fence_holder": SOMEBODY},
            {"which": 2, "balance": 99, "fence_token": 999, "fence_holder": SOMEBODY},
        ],
    )


@shape(ACCOUNTS, writes={Account: [1]})
def core_update_in_a_given_order_that_sets_the_fence(session: Session) -> None:
    statement = account.update().where(account.c.id == 1)
    ordered = statement.ordered_values((account.c.fence_token, 999), (account.c.balance, 99))
    session.connection().execute(ordered)


@shape(ACCOUNTS, writes={Account: [1]})
def core_lambda_update(session: Session) -> None:
    statement = sa.lambda_stmt(lambda: account.update().where(account.c.id == 1).values(balance=99))
    session.connection().execute(statement)


@shape(VAULTS, writes={Vault: [2, 3]})
def core_update_many_with_the_schema_told_to_the_statement(session: Session) -> None:
    statement = vault.update().where(vault.c.id == bindparam("which")).values(content=bindparam("new"))
    session.connection().execute(
        statement,
        [{"which": 2, "new": "lead"}, {"which": 3, "new": "iron"}],
        execution_options={"schema_translate_map": session.info["schemas"]},
    )
