"""Shapes of ORM statements: by criteria, and in bulk by primary key."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session, aliased, with_loader_criteria

from guard_kit.models import Account, Cat, Dog, Engineer, Line, Note, Pet, Safe, Slot, Staff, Vault
from guard_kit.shape import shape
from guard_kit.worlds import ACCOUNTS, ACCOUNTS_AND_NOTES, BASKETS, PETS, SAFES, SLOTS, STAFF, VAULTS

NORTH = Account.region == "north"
SOMEBODY = UUID(int=7)


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update(session: Session) -> None:
    session.execute(update(Account).where(NORTH).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_evaluated_in_python(session: Session) -> None:
    loaded = session.scalars(select(Account)).all()
    session.execute(update(Account).where(NORTH).values(balance=99), execution_options=_sync("evaluate"))
    assert sorted(account.balance for account in loaded) == [99, 99, 300, 400]


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_fetched(session: Session) -> None:
    loaded = session.scalars(select(Account)).all()
    session.execute(update(Account).where(NORTH).values(balance=99), execution_options=_sync("fetch"))
    assert sorted(account.balance for account in loaded) == [99, 99, 300, 400]


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_of_what_it_looks_at(session: Session) -> None:
    session.execute(update(Account).where(NORTH).values(region="east"), execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [1]})
def criteria_update_by_key(session: Session) -> None:
    session.execute(update(Account).where(Account.id == 1).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_by_keys(session: Session) -> None:
    session.execute(update(Account).where(Account.id.in_([1, 2])).values(balance=99))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_returning(session: Session) -> None:
    found = session.scalars(update(Account).where(NORTH).values(balance=99).returning(Account))
    assert sorted(account.balance for account in found) == [99, 99]


@shape(ACCOUNTS, writes={Account: [1, 2, 3, 4]})
def criteria_update_of_all(session: Session) -> None:
    session.execute(update(Account).values(balance=Account.balance * 2))


@shape(SLOTS, writes={Slot: [("blue", 9), ("blue", 10)]})
def criteria_update_of_a_composite_key(session: Session) -> None:
    session.execute(update(Slot).where(Slot.room == "blue").values(guest="eve"))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def criteria_delete(session: Session) -> None:
    session.execute(delete(Account).where(NORTH))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def criteria_delete_fetched(session: Session) -> None:
    session.scalars(select(Account)).all()
    session.execute(delete(Account).where(NORTH), execution_options=_sync("fetch"))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def criteria_delete_returning(session: Session) -> None:
    found = session.scalars(delete(Account).where(NORTH).returning(Account.id)).all()
    assert sorted(found) == [1, 2]


@shape(ACCOUNTS, deletes={Account: [1, 2, 3, 4]})
def criteria_delete_of_all(session: Session) -> None:
    session.execute(delete(Account))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_by_legacy_query(session: Session) -> None:
    session.query(Account).filter(NORTH).update({"balance": 99})


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def criteria_delete_by_legacy_query(session: Session) -> None:
    session.query(Account).filter(NORTH).delete()


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_of_an_alias(session: Session) -> None:
    other = aliased(Account)
    statement = update(other).where(other.region == "north").values(balance=99)
    session.execute(statement, execution_options=_sync(False))


@shape(VAULTS, writes={Vault: [2, 3]})
def criteria_update_with_the_schema_told_to_the_statement(session: Session) -> None:
    statement = update(Vault).where(Vault.content == "tin").values(content="lead")
    schemas = {"schema_translate_map": session.info["schemas"]}
    session.execute(statement, execution_options={**schemas, **_sync(False)})


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_with_loader_criteria(session: Session) -> None:
    session.execute(update(Account).values(balance=99).options(with_loader_criteria(Account, NORTH)))


@shape(ACCOUNTS, deletes={Account: [1, 2]})
def criteria_delete_with_loader_criteria(session: Session) -> None:
    session.execute(delete(Account).options(with_loader_criteria(Account, NORTH)))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def criteria_update_that_sets_the_fence(session: Session) -> None:
    session.execute(update(Account).where(NORTH).values(balance=99, fence_token=999, fence_holder=SOMEBODY))


# Inheritance


@shape(PETS, writes={Pet: [1, 2]})
def criteria_update_of_one_class_of_a_table(session: Session) -> None:
    session.execute(update(Dog).where(Dog.name == "rex").values(name="ace"))


@shape(PETS, writes={Pet: [3]})
def criteria_update_of_all_of_one_class(session: Session) -> None:
    session.execute(update(Cat).values(name="tom"))


@shape(PETS, deletes={Pet: [1, 2]})
def criteria_delete_of_one_class_of_a_table(session: Session) -> None:
    session.execute(delete(Dog).where(Dog.name == "rex"))


@shape(STAFF, writes={Staff: [1, 2]})
def criteria_update_of_a_subclass_table(session: Session) -> None:
    session.execute(update(Engineer).where(Engineer.stack == "python").values(stack="rust"))


@shape(STAFF, writes={Staff: [1, 2]})
def criteria_update_of_a_subclass_table_where_itself_says_so(session: Session) -> None:
    own, other = Engineer.__table__, Engineer.__table__.alias()
    twin = select(other.c.id).where(other.c.stack == own.c.stack, other.c.id != own.c.id).exists()
    session.execute(update(Engineer).where(twin).values(stack="rust"), execution_options=_sync(False))


@shape(STAFF, writes={Staff: [1, 2]})
def criteria_update_of_an_alias_of_a_subclass_table(session: Session) -> None:
    other = Engineer.__table__.alias("other")
    session.execute(update(other).where(other.c.stack == "python").values(stack="rust"))


@shape(SAFES, writes={Vault: [1, 2]})
def criteria_update_of_a_subclass_table_with_the_schema_told_to_the_statement(session: Session) -> None:
    statement = update(Safe).where(Safe.code == "1234").values(code="0000")
    schemas = {"schema_translate_map": session.info["schemas"]}
    session.execute(statement, execution_options={**schemas, **_sync(False)})


@shape(STAFF, writes={Staff: [1]})
def criteria_update_of_a_subclass_table_by_key(session: Session) -> None:
    session.execute(update(Engineer).where(Engineer.__table__.c.id == 1).values(stack="rust"))


@shape(STAFF, writes={Staff: [1, 2]})
def criteria_delete_of_a_subclass_table(session: Session) -> None:
    session.execute(delete(Engineer).where(Engineer.stack == "python"), execution_options=_sync(False))


# In bulk, by primary key


@shape(ACCOUNTS, writes={Account: [1, 2]})
def bulk_update(session: Session) -> None:
    session.execute(update(Account), [{"id": 1, "balance": 98}, {"id": 2, "balance": 99}])


@shape(ACCOUNTS, writes={Account: [1]})
def bulk_update_of_one(session: Session) -> None:
    session.execute(update(Account), [{"id": 1, "balance": 98}])


@shape(ACCOUNTS, writes={Account: [1, 2]})
def bulk_update_of_different_columns(session: Session) -> None:
    session.execute(update(Account), [{"id": 1, "balance": 98}, {"id": 2, "region": "east"}])


@shape(ACCOUNTS, writes={Account: [1, 2]})
def bulk_update_that_sets_the_fence(session: Session) -> None:
    session.execute(
        update(Account),
        [{"id": 1, "balance": 98, "fence_token": 999}, {"id": 2, "balance": 99, "fence_token": 999}],
    )


@shape(SLOTS, writes={Slot: [("blue", 9), ("blue", 10)]})
def bulk_update_of_a_composite_key(session: Session) -> None:
    session.execute(
        update(Slot),
        [{"room": "blue", "hour": 9, "guest": "eve"}, {"room": "blue", "hour": 10, "guest": "fay"}],
    )


@shape(ACCOUNTS, writes={Account: [1, 2]})
def bulk_update_by_mappings(session: Session) -> None:
    session.bulk_update_mappings(Account, [{"id": 1, "balance": 98}, {"id": 2, "balance": 99}])


@shape(ACCOUNTS, writes={Account: [1, 2]})
def bulk_save_of_changed_objects(session: Session) -> None:
    accounts = session.scalars(select(Account).where(NORTH)).all()
    session.expunge_all()
    for account in accounts:
        account.balance += 5
    session.bulk_save_objects(accounts)


@shape(STAFF, writes={Staff: [1, 2]})
def bulk_update_of_base_and_subclass_tables(session: Session) -> None:
    session.execute(
        update(Engineer),
        [{"id": 1, "name": "eve", "stack": "rust"}, {"id": 2, "name": "fay", "stack": "rust"}],
    )


@shape(STAFF, writes={Staff: [1, 2]})
def bulk_update_of_a_subclass_table_only(session: Session) -> None:
    session.execute(update(Engineer), [{"id": 1, "stack": "rust"}, {"id": 2, "stack": "rust"}])


# Statements that look at more than the row


@shape({**ACCOUNTS, **BASKETS}, writes={Account: [1, 2]})
def update_from_a_correlated_subquery(session: Session) -> None:
    total = select(sa.func.sum(Line.amount)).where(Line.basket_id == Account.id).scalar_subquery()
    session.execute(update(Account).where(NORTH).values(balance=total), execution_options=_sync(False))


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1, 2]})
def update_from_another_table(session: Session) -> None:
    statement = update(Account).where(Account.id == Note.id).values(region=Note.body)
    session.execute(statement, execution_options=_sync(False))


@shape({**ACCOUNTS, **BASKETS}, writes={Account: [1, 2]})
def update_from_a_subquery(session: Session) -> None:
    grouped = select(Line.basket_id, sa.func.sum(Line.amount).label("total")).group_by(Line.basket_id)
    sums = grouped.subquery()
    statement = update(Account).where(Account.id == sums.c.basket_id).values(balance=sums.c.total)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1, 2]})
def update_with_a_common_table_expression(session: Session) -> None:
    noted = select(Note.id).where(Note.body != "").cte("noted")
    statement = update(Account).where(Account.id.in_(select(noted.c.id))).values(balance=99)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS_AND_NOTES, deletes={Account: [1, 2]})
def delete_using_another_table(session: Session) -> None:
    session.execute(delete(Account).where(Account.id == Note.id), execution_options=_sync(False))


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1, 2]})
def update_where_a_subquery_says_so(session: Session) -> None:
    session.execute(update(Account).where(Account.id.in_(select(Note.id))).values(balance=99))


@shape(ACCOUNTS_AND_NOTES, deletes={Account: [1, 2]})
def delete_where_a_subquery_says_so(session: Session) -> None:
    session.execute(delete(Account).where(Account.id.in_(select(Note.id))))


@shape(ACCOUNTS_AND_NOTES, writes={Account: [1, 2]})
def update_where_another_row_exists(session: Session) -> None:
    there = select(Note.id).where(Note.id == Account.id).exists()
    session.execute(update(Account).where(there).values(balance=99))


@shape(ACCOUNTS, writes={Account: [3, 4]})
def update_where_its_own_table_says_so(session: Session) -> None:
    other = aliased(Account)
    average = select(sa.func.avg(other.balance)).scalar_subquery()
    session.execute(update(Account).where(Account.balance > average).values(balance=0))


@shape(ACCOUNTS, deletes={Account: [3, 4]})
def delete_where_its_own_table_says_so(session: Session) -> None:
    other = aliased(Account)
    average = select(sa.func.avg(other.balance)).scalar_subquery()
    session.execute(delete(Account).where(Account.balance > average))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def update_from_an_alias_of_its_own_table(session: Session) -> None:
    other = aliased(Account)
    statement = update(Account).where(Account.balance + 200 == other.balance).values(region=other.region)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [4]})
def update_of_the_greatest(session: Session) -> None:
    greatest = select(sa.func.max(Account.balance)).correlate(None).scalar_subquery()
    statement = update(Account).where(Account.balance == greatest).values(balance=0)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [2, 4]})
def update_of_the_greatest_of_each_kind(session: Session) -> None:
    other = aliased(Account)
    most = select(other.region, sa.func.max(other.balance).label("top")).group_by(other.region).subquery()
    where = sa.and_(Account.region == most.c.region, Account.balance == most.c.top)
    session.execute(update(Account).where(where).values(balance=0), execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [3, 4]})
def update_of_those_above_the_mean(session: Session) -> None:
    other = aliased(Account)
    mean = select(sa.func.avg(other.balance).label("balance")).subquery()
    statement = update(Account).where(Account.balance > mean.c.balance).values(balance=10_000)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [3, 4]})
def update_of_the_first_few(session: Session) -> None:
    other = aliased(Account)
    first = select(other.id).order_by(other.balance.desc()).limit(2).cte("first")
    statement = update(Account).where(Account.id.in_(select(first.c.id))).values(balance=0)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [1]})
def update_by_key_where_its_own_table_says_so(session: Session) -> None:
    other = aliased(Account)
    more = select(other.id).where(other.region == Account.region, other.balance > Account.balance).exists()
    statement = update(Account).where(Account.id == 1, more).values(balance=1000)
    session.execute(statement, execution_options=_sync(False))


@shape(ACCOUNTS, deletes={Account: [1, 3]})
def delete_where_another_row_of_its_own_table_exists(session: Session) -> None:
    other = aliased(Account)
    more = select(other.id).where(other.region == Account.region, other.balance > Account.balance).exists()
    session.execute(delete(Account).where(more), execution_options=_sync(False))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def update_from_an_alias_found_by_key(session: Session) -> None:
    other = aliased(Account)
    where = sa.and_(other.id == 1, Account.region == other.region)
    session.execute(update(Account).where(where).values(balance=99), execution_options=_sync(False))


# Statements made by a lambda


@shape(ACCOUNTS, writes={Account: [1, 2]})
def lambda_update(session: Session) -> None:
    session.execute(sa.lambda_stmt(lambda: update(Account).where(NORTH).values(balance=99)))


@shape(ACCOUNTS, writes={Account: [1, 2]})
def lambda_update_of_one_after_the_other(session: Session) -> None:
    for which in (1, 2):
        made = sa.lambda_stmt(lambda: update(Account).where(Account.id == which).values(balance=which))  # noqa: B023
        session.execute(made)


@shape(ACCOUNTS, deletes={Account: [1]})
def lambda_delete(session: Session) -> None:
    wanted = 1
    session.execute(sa.lambda_stmt(lambda: delete(Account).where(Account.id == wanted)))


def _sync(how: str | bool) -> dict[str, object]:
    return {"synchronize_session": how}
