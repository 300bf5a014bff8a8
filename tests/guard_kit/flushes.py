"""Shapes of the unit of work: what a flush sends for objects that were changed, deleted or joined."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from guard_kit.models import (
    Account,
    Album,
    Badge,
    Basket,
    Dog,
    Draft,
    Engineer,
    Gauge,
    Label,
    Line,
    Parcel,
    Pet,
    Photo,
    Safe,
    Slot,
    Staff,
    Tag,
    Ticket,
    Vault,
    basket_tag,
)
from guard_kit.shape import shape
from guard_kit.worlds import (
    ACCOUNTS,
    ALBUMS,
    BADGES,
    BASKETS,
    DRAFTS,
    GAUGES,
    ONE,
    PETS,
    SAFES,
    SLOTS,
    STAFF,
    TAGGED,
    TICKETS,
    TWO,
    VAULTS,
)


@shape(ACCOUNTS, writes={Account: [1]})
def one_object_changed(session: Session) -> None:
    session.get_one(Account, 1).balance = 99


@shape(ACCOUNTS, writes={Account: [1, 2, 3]})
def many_objects_changed(session: Session) -> None:
    for account in session.scalars(select(Account).where(Account.id <= 3)):
        account.balance += 1


@shape(ACCOUNTS, writes={Account: [1, 2, 3]})
def objects_changed_in_different_columns(session: Session) -> None:
    session.get_one(Account, 1).balance = 99
    session.get_one(Account, 2).region = "east"
    third = session.get_one(Account, 3)
    third.balance, third.region = 98, "west"


@shape(ACCOUNTS, writes={Account: [1]})
def attribute_set_to_an_expression(session: Session) -> None:
    session.get_one(Account, 1).balance = Account.balance + 5


@shape(ACCOUNTS, writes={Account: [1]})
def object_changed_and_flushed_twice(session: Session) -> None:
    account = session.get_one(Account, 1)
    account.balance = 98
    session.flush()
    account.balance = 99


@shape(ACCOUNTS, writes={Account: [1]})
def object_whose_own_fence_was_set(session: Session) -> None:
    account = session.get_one(Account, 1)
    account.balance, account.fence_token = 99, 999


@shape(ACCOUNTS, deletes={Account: [1]}, adds={Account: 1})
def object_whose_key_was_changed(session: Session) -> None:
    session.get_one(Account, 1).id = 51


@shape(ACCOUNTS, deletes={Account: [1, 2]}, adds={Account: 2})
def objects_whose_keys_were_changed(session: Session) -> None:
    for account in session.scalars(select(Account).where(Account.id <= 2)):
        account.id += 50


@shape(ACCOUNTS, deletes={Account: [1]})
def one_object_deleted(session: Session) -> None:
    session.delete(session.get_one(Account, 1))


@shape(ACCOUNTS, deletes={Account: [1, 2, 3]})
def many_objects_deleted(session: Session) -> None:
    for account in session.scalars(select(Account).where(Account.id <= 3)):
        session.delete(account)


@shape(ACCOUNTS, writes={Account: [1]}, deletes={Account: [2]}, adds={Account: 1})
def objects_changed_deleted_and_added(session: Session) -> None:
    session.get_one(Account, 1).balance = 99
    session.delete(session.get_one(Account, 2))
    session.add(Account(id=9, code="i", region="east"))


# Keys, names, schemas


@shape(SLOTS, writes={Slot: [("blue", 9)]})
def composite_key_object_changed(session: Session) -> None:
    session.get_one(Slot, ("blue", 9)).guest = "eve"


@shape(SLOTS, writes={Slot: [("blue", 9), ("blue", 10)]})
def composite_key_objects_changed(session: Session) -> None:
    for slot in session.scalars(select(Slot).where(Slot.room == "blue")):
        slot.guest = "eve"


@shape(SLOTS, deletes={Slot: [("blue", 9)]})
def composite_key_object_deleted(session: Session) -> None:
    session.delete(session.get_one(Slot, ("blue", 9)))


@shape(SLOTS, deletes={Slot: [("blue", 9), ("blue", 10)]})
def composite_key_objects_deleted(session: Session) -> None:
    for slot in session.scalars(select(Slot).where(Slot.room == "blue")):
        session.delete(slot)


@shape(TICKETS, writes={Ticket: [ONE, TWO]})
def uuid_key_objects_changed(session: Session) -> None:
    for ticket in session.scalars(select(Ticket).where(Ticket.seat <= 2)):
        ticket.seat += 10


@shape(TICKETS, deletes={Ticket: [ONE, TWO]})
def uuid_key_objects_deleted(session: Session) -> None:
    for ticket in session.scalars(select(Ticket).where(Ticket.seat <= 2)):
        session.delete(ticket)


@shape(BADGES, writes={Badge: ["x", "y"]})
def converted_key_objects_changed(session: Session) -> None:
    for badge in session.scalars(select(Badge).where(Badge.level <= 2)):
        badge.level += 10


@shape(BADGES, deletes={Badge: ["x", "y"]})
def converted_key_objects_deleted(session: Session) -> None:
    for badge in session.scalars(select(Badge).where(Badge.level <= 2)):
        session.delete(badge)


def _translated(session: Session) -> None:
    session.connection(execution_options={"schema_translate_map": session.info["schemas"]})


@shape(VAULTS, writes={Vault: [1]})
def object_changed_in_a_translated_schema(session: Session) -> None:
    _translated(session)
    session.get_one(Vault, 1).content = "lead"


@shape(VAULTS, writes={Vault: [2, 3]})
def objects_changed_in_a_translated_schema(session: Session) -> None:
    _translated(session)
    for vault in session.scalars(select(Vault).where(Vault.content == "tin")):
        vault.content = "lead"


@shape(VAULTS, deletes={Vault: [1]})
def object_deleted_in_a_translated_schema(session: Session) -> None:
    _translated(session)
    session.delete(session.get_one(Vault, 1))


@shape(SAFES, writes={Vault: [1]})
def subclass_object_changed_in_a_translated_schema(session: Session) -> None:
    _translated(session)
    session.get_one(Safe, 1).code = "0000"


# Inheritance


@shape(STAFF, writes={Staff: [1]})
def subclass_object_changed_in_the_base_table(session: Session) -> None:
    session.get_one(Engineer, 1).name = "eve"


@shape(STAFF, writes={Staff: [1]})
def subclass_object_changed_in_its_own_table(session: Session) -> None:
    session.get_one(Engineer, 1).stack = "rust"


@shape(STAFF, writes={Staff: [1]})
def subclass_object_changed_in_both_tables(session: Session) -> None:
    engineer = session.get_one(Engineer, 1)
    engineer.name, engineer.stack = "eve", "rust"


@shape(STAFF, writes={Staff: [1, 2]})
def subclass_objects_changed_in_their_own_table(session: Session) -> None:
    for engineer in session.scalars(select(Engineer).where(Engineer.stack == "python")):
        engineer.stack = "rust"


@shape(STAFF, writes={Staff: [1, 2]})
def subclass_objects_changed_in_both_tables(session: Session) -> None:
    for engineer in session.scalars(select(Engineer).where(Engineer.stack == "python")):
        engineer.name, engineer.stack = "eve", "rust"


@shape(STAFF, deletes={Staff: [1]})
def subclass_object_deleted(session: Session) -> None:
    session.delete(session.get_one(Engineer, 1))


@shape(STAFF, deletes={Staff: [1, 2, 3]})
def subclass_objects_deleted(session: Session) -> None:
    for staff in session.scalars(select(Staff).where(Staff.id <= 3)):
        session.delete(staff)


@shape(PETS, writes={Pet: [1]})
def single_table_object_changed(session: Session) -> None:
    session.get_one(Dog, 1).name = "ace"


@shape(PETS, deletes={Pet: [1]})
def single_table_object_deleted(session: Session) -> None:
    session.delete(session.get_one(Dog, 1))


# Relationships


@shape(BASKETS, writes={Line: [1]})
def child_taken_out_of_its_parent(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.lines.remove(basket.lines[0])


@shape(BASKETS, writes={Line: [3]})
def child_moved_to_another_parent(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.lines.append(session.get_one(Line, 3))


@shape(BASKETS, deletes={Parcel: [1]})
def orphan_deleted(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.parcels.remove(basket.parcels[0])


@shape(BASKETS, deletes={Basket: [1], Parcel: [1, 2]}, writes={Line: [1, 2]})
def parent_deleted_with_its_children(session: Session) -> None:
    session.delete(session.get_one(Basket, 1))


@shape(TAGGED, writes={Basket: [1], Tag: [3]})
def many_to_many_appended(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.tags.append(session.get_one(Tag, 3))


@shape(TAGGED, writes={Basket: [1], Tag: [1]})
def many_to_many_removed(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.tags.remove(basket.tags[0])


@shape(TAGGED, writes={Basket: [1], Tag: [1, 2, 3]})
def many_to_many_replaced(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.tags = [session.get_one(Tag, 3)]


@shape(TAGGED, writes={Basket: [1]})
def many_to_many_appended_from_an_unfenced_table(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.labels.append(session.get_one(Label, 2))


@shape(TAGGED, writes={Basket: [1]})
def many_to_many_removed_from_an_unfenced_table(session: Session) -> None:
    basket = session.get_one(Basket, 1)
    basket.labels.clear()


@shape(TAGGED, writes={Tag: [1, 2]}, deletes={Basket: [1]})
def parent_deleted_with_its_many_to_many(session: Session) -> None:
    session.delete(session.get_one(Basket, 1))


@shape(TAGGED, writes={Basket: [1], Tag: [1, 2]})
def many_to_many_rows_deleted_by_criteria(session: Session) -> None:
    session.execute(basket_tag.delete().where(basket_tag.c.basket_id == 1))


@shape(TAGGED, writes={Basket: [2], Tag: [1, 2]})
def many_to_many_rows_inserted(session: Session) -> None:
    session.execute(basket_tag.insert(), [{"basket_id": 2, "tag_id": 1}, {"basket_id": 2, "tag_id": 2}])


@shape(TAGGED, writes={Basket: [1], Tag: [1, 3]})
def many_to_many_row_moved(session: Session) -> None:
    session.execute(basket_tag.update().where(basket_tag.c.tag_id == 1).values(tag_id=3))


@shape(TAGGED, writes={Basket: [2], Tag: [1, 2]})
def many_to_many_rows_inserted_as_values(session: Session) -> None:
    rows = [{"basket_id": 2, "tag_id": 1}, {"basket_id": 2, "tag_id": 2}]
    session.execute(basket_tag.insert().values(rows))


@shape(TAGGED, writes={Basket: [1], Tag: [1, 2]})
def many_to_many_rows_deleted_through_an_alias(session: Session) -> None:
    other = basket_tag.alias("other")
    session.execute(delete(other).where(other.c.basket_id == 1))


@shape(ALBUMS, writes={Album: [2]})
def post_update(session: Session) -> None:
    album = session.get_one(Album, 2)
    album.cover = album.photos[0]


@shape(ALBUMS, writes={Album: [2]}, adds={Photo: 1})
def post_update_to_a_new_object(session: Session) -> None:
    album = session.get_one(Album, 2)
    photo = Photo(id=9)
    album.photos.append(photo)
    album.cover = photo


@shape(ALBUMS, deletes={Album: [1], Photo: [1, 2]})
def post_update_before_a_delete(session: Session) -> None:
    session.delete(session.get_one(Album, 1))


# What mappers can be told to do at each write


@shape(GAUGES, writes={Gauge: [1]})
def eager_defaults_of_one_object(session: Session) -> None:
    session.get_one(Gauge, 1).level = 9


@shape(GAUGES, writes={Gauge: [1, 2]})
def eager_defaults_of_many_objects(session: Session) -> None:
    for gauge in session.scalars(select(Gauge).where(Gauge.id <= 2)):
        gauge.level += 7


@shape(DRAFTS, writes={Draft: [1]})
def versioned_object_changed(session: Session) -> None:
    session.get_one(Draft, 1).body = "new"


@shape(DRAFTS, writes={Draft: [1, 2]})
def versioned_objects_changed(session: Session) -> None:
    for draft in session.scalars(select(Draft).where(Draft.id <= 2)):
        draft.body = "new"


@shape(DRAFTS, deletes={Draft: [1]})
def versioned_object_deleted(session: Session) -> None:
    session.delete(session.get_one(Draft, 1))


# Objects from elsewhere


@shape(ACCOUNTS, writes={Account: [1]})
def detached_object_merged(session: Session) -> None:
    account = session.get_one(Account, 1)
    session.expunge(account)
    account.balance = 99
    session.merge(account)


@shape(ACCOUNTS, writes={Account: [1]})
def new_object_with_a_known_key_merged(session: Session) -> None:
    session.merge(Account(id=1, code="a", region="north", balance=99))


@shape(ACCOUNTS, writes={Account: [1]})
def detached_object_added_again(session: Session) -> None:
    account = session.get_one(Account, 1)
    session.expunge(account)
    account.balance = 99
    session.add(account)
