"""Every shape of write, on every driver: what a newer holder may do, and what nobody else can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from guard_kit.databases import DRIVERS, Database, Key, Snapshot, Stamp, Write, fence_in
from guard_kit.models import FENCES, GENERATED, Account, Note
from guard_kit.shapes import DEPENDS_ON_VERSION, LEFT_OUT, SHAPES, Shape
from guard_kit.worlds import ACCOUNTS, NOTES
from sqlalchemy import Update, insert, update
from sqlalchemy.exc import CompileError, DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from fencing.errors import FencingError, StaleToken, UnguardedWrite
from fencing.sql import guarded
from fencing.token import Grant

OLD = Stamp(10, "0" * 31 + "a")
MINE = Stamp(20, "1" * 31 + "b")
TWIN = Stamp(20, "2" * 31 + "c")
NEWER = Stamp(30, "3" * 31 + "d")

GRANT = Grant(
    namespace="test", resources=("r",), holder=MINE.holder, token=MINE.token, deadline=0.0, label=""
)

PAIRS = [(driver, shape) for driver in DRIVERS.values() for shape in SHAPES.values()]
CASES = [(driver, shape) for driver, shape in PAIRS if (shape.name, driver.dialect) not in LEFT_OUT]

account, note = Account.__table__, Note.__table__
TWO_TABLES_BY_VALUES = update(note).where(note.c.id == account.c.id).values({account.c.balance: 99})
TWO_TABLES_BY_JOIN = update(note.join(account, note.c.id == account.c.id)).values({account.c.balance: 99})

SWALLOWED = (
    "one_object_changed",
    "many_objects_changed",
    "one_object_deleted",
    "many_objects_deleted",
    "subclass_object_changed_in_its_own_table",
    "many_to_many_appended",
    "post_update",
    "versioned_object_changed",
    "criteria_update",
    "criteria_delete",
    "bulk_update",
    "core_update_by_key",
    "core_update_many_by_key",
    "update_where_a_subquery_says_so",
    "upsert_many",
    "upsert_returning",
    "on_duplicate_key_many",
)


def on(cases: Iterable[tuple[Any, Shape]]) -> pytest.MarkDecorator:
    """The test is done with each of the shapes on its database."""
    parameters = [
        pytest.param(driver.name, shape, id=f"{driver.name}-{shape.name}") for driver, shape in cases
    ]
    return pytest.mark.parametrize(("database", "shape"), parameters, indirect=["database"])


every_shape = on(CASES)
shapes_that_meet_rows = on(case for case in CASES if case[1].targets)
representative_shapes = on(case for case in CASES if case[1].name in SWALLOWED)


@every_shape
def test_a_newer_holder_writes_and_stamps_what_it_wrote(database: Database, shape: Shape) -> None:
    wanted = effect(database, shape)
    before = database.seed(shape.world, everywhere(OLD))
    database.run(committed(shape.write), GRANT)

    after = database.snapshot()
    assert data_in(after) == wanted, "the guard changed what the write does"
    assert_stamped(shape, before, after)


@every_shape
def test_the_same_holder_writes_again(database: Database, shape: Shape) -> None:
    before = database.seed(shape.world, everywhere(MINE))

    database.run(committed(shape.write), GRANT)

    assert_stamped(shape, before, database.snapshot())


@every_shape
def test_newer_rows_that_it_does_not_write_do_not_matter(database: Database, shape: Shape) -> None:
    before = database.seed(shape.world, lambda table, key: OLD if shape.named(table, key) else NEWER)

    database.run(committed(shape.write), GRANT)

    assert_stamped(shape, before, database.snapshot())


@every_shape
def test_a_stale_holder_changes_nothing(database: Database, shape: Shape) -> None:
    refuses_or_only_inserts(database, shape, NEWER)


@every_shape
def test_another_holder_with_the_same_token_changes_nothing(database: Database, shape: Shape) -> None:
    refuses_or_only_inserts(database, shape, TWIN)


def refuses_or_only_inserts(database: Database, shape: Shape, stored: Stamp) -> None:
    before = database.seed(shape.world, everywhere(stored))
    if not shape.targets:  # row level alone, the light mode: nothing is there to compare an INSERT with
        database.run(committed(shape.write), GRANT)
        assert_stamped(shape, before, database.snapshot())
        return

    with pytest.raises(StaleToken) as refusal:
        database.run(committed(shape.write), GRANT)

    assert database.snapshot() == before
    assert_told(refusal.value, stored, shape.targets)


@shapes_that_meet_rows
def test_one_newer_row_is_enough_to_refuse(database: Database, shape: Shape) -> None:
    for newer in dict.fromkeys([*shape.targets[:3], shape.targets[-1]]):
        before = database.seed(shape.world, lambda *row, newer=newer: NEWER if row == newer else OLD)

        with pytest.raises(StaleToken) as refusal:
            database.run(committed(shape.write), GRANT)

        assert database.snapshot() == before
        assert_told(refusal.value, NEWER, [newer])


@every_shape
def test_a_write_without_a_guard_changes_nothing(database: Database, shape: Shape) -> None:
    before = database.seed(shape.world, everywhere(OLD))

    with pytest.raises(UnguardedWrite) as refusal:
        database.run(committed(shape.write))

    assert refusal.value.table
    assert database.snapshot() == before


@representative_shapes
def test_a_refusal_that_was_swallowed_cannot_be_committed(database: Database, shape: Shape) -> None:
    def work(session: Session) -> None:
        session.execute(insert(Note).values(id=77, body="in the same transaction"))
        with contextlib.suppress(StaleToken):
            shape.write(session)
            session.flush()
        session.commit()

    before = database.seed(shape.world, everywhere(NEWER))

    with pytest.raises((StaleToken, PendingRollbackError)):
        database.run(work, GRANT)

    assert database.snapshot() == before


@representative_shapes
def test_a_savepoint_does_not_make_a_swallowed_refusal_good(database: Database, shape: Shape) -> None:
    def work(session: Session) -> None:
        session.execute(insert(Note).values(id=77, body="in the same transaction"))
        with contextlib.suppress(StaleToken), session.begin_nested():
            shape.write(session)
        session.commit()

    before = database.seed(shape.world, everywhere(NEWER))

    with pytest.raises((StaleToken, PendingRollbackError)):
        database.run(work, GRANT)

    assert database.snapshot() == before


@representative_shapes
def test_what_a_savepoint_kept_goes_with_the_refusal_that_follows(database: Database, shape: Shape) -> None:
    def work(session: Session) -> None:
        with session.begin_nested():
            session.execute(insert(Note).values(id=77, body="in the same transaction"))
        with contextlib.suppress(StaleToken):
            shape.write(session)
            session.flush()
        session.commit()

    before = database.seed(shape.world, everywhere(NEWER))

    with pytest.raises((StaleToken, PendingRollbackError)):
        database.run(work, GRANT)

    assert database.snapshot() == before


@on(case for case in CASES if case[0].name == "pysqlite" and "returning" in case[1].name and case[1].targets)
def test_a_refusal_leaves_no_cursor_open(database: Database, shape: Shape) -> None:
    """While somebody keeps the error, as a log does, an open cursor would keep SQLite's lock."""
    newer = shape.targets[0]
    database.seed(shape.world, lambda *row: NEWER if row == newer else OLD)

    with pytest.raises(StaleToken) as kept, Session(database.engine) as session, guarded(session, GRANT):
        shape.write(session)

    try:
        database.seed(shape.world, everywhere(OLD))
    finally:
        del kept


@pytest.mark.parametrize("statement", [TWO_TABLES_BY_VALUES, TWO_TABLES_BY_JOIN], ids=["values", "join"])
@pytest.mark.parametrize("grant", [GRANT, None], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("database", ["pymysql"], indirect=True)
def test_an_update_of_several_tables_cannot_reach_a_fenced_one(
    database: Database, grant: Grant | None, statement: Update
) -> None:
    """MySQL and MariaDB can say UPDATE a, b SET b.x = ...: then b is written, and it is not the statement's table."""
    before = database.seed({account: ACCOUNTS[Account], note: NOTES[Note]}, everywhere(NEWER))

    with pytest.raises(FencingError):
        database.run(committed(lambda session: session.connection().execute(statement)), grant)

    assert database.snapshot() == before


# The matrix itself


@pytest.mark.parametrize(
    ("test", "needed"),
    [
        (test_a_newer_holder_writes_and_stamps_what_it_wrote, lambda shape: True),
        (test_the_same_holder_writes_again, lambda shape: True),
        (test_newer_rows_that_it_does_not_write_do_not_matter, lambda shape: True),
        (test_a_stale_holder_changes_nothing, lambda shape: True),
        (test_another_holder_with_the_same_token_changes_nothing, lambda shape: True),
        (test_a_write_without_a_guard_changes_nothing, lambda shape: True),
        (test_one_newer_row_is_enough_to_refuse, lambda shape: shape.targets),
        (test_a_refusal_that_was_swallowed_cannot_be_committed, lambda shape: shape.name in SWALLOWED),
        (test_a_savepoint_does_not_make_a_swallowed_refusal_good, lambda shape: shape.name in SWALLOWED),
    ],
    ids=lambda value: getattr(value, "__name__", "").removeprefix("test_"),
)
def test_no_combination_is_left_out_without_a_reason(test: Any, needed: Callable[[Shape], object]) -> None:
    tried = {case.values for mark in test.pytestmark for case in mark.args[1]}

    for driver in DRIVERS.values():
        for shape in SHAPES.values():
            reason = LEFT_OUT.get((shape.name, driver.dialect), "")
            if needed(shape):
                assert ((driver.name, shape) in tried) != bool(reason.strip()), (
                    f"{shape.name} on {driver.name}"
                )


def test_what_is_left_out_exists() -> None:
    dialects = {driver.dialect for driver in DRIVERS.values()}

    assert {name for name, _ in LEFT_OUT} <= set(SHAPES)
    assert {dialect for _, dialect in LEFT_OUT} <= dialects
    assert set(SWALLOWED) <= set(SHAPES)


@on(
    (driver, shape)
    for driver, shape in PAIRS
    if (reason := LEFT_OUT.get((shape.name, driver.dialect))) and reason not in DEPENDS_ON_VERSION
)
def test_what_is_left_out_cannot_be_said_there(database: Database, shape: Shape) -> None:
    before = database.seed(shape.world, everywhere(OLD))

    with pytest.raises((CompileError, DBAPIError, NotImplementedError, TypeError)):
        database.run_plainly(committed(shape.write))

    assert database.snapshot() == before


def test_every_shape_says_what_it_is_about() -> None:
    for shape in SHAPES.values():
        assert shape.targets or shape.adds, f"{shape.name} is about no fenced row"
        there = {(table.fullname, key) for table, rows in shape.world.items() for key in keys_in(table, rows)}
        assert set(shape.targets) <= there, f"{shape.name} is about rows that are not in its world"


# What the tests say in one word


def everywhere(stamp: Stamp) -> Callable[[str, Key], Stamp]:
    return lambda table, key: stamp


def effect(database: Database, shape: Shape) -> dict[str, list[Any]]:
    """What the write does where there is no guard, found out once on each kind of database."""
    which = (shape.name, database.dialect)
    if which not in EFFECTS:
        database.seed(shape.world, everywhere(OLD))
        database.run_plainly(committed(shape.write))
        EFFECTS[which] = data_in(database.snapshot())
    return EFFECTS[which]


EFFECTS: dict[tuple[str, str], dict[str, list[Any]]] = {}


def committed(write: Write) -> Write:
    def work(session: Session) -> None:
        write(session)
        session.commit()

    return work


def keys_in(table: Any, rows: list[dict[str, Any]]) -> list[Key]:
    return [tuple(row[column.name] for column in table.primary_key.columns) for row in rows]


def data_in(snapshot: Snapshot) -> dict[str, list[Any]]:
    """All that is not the fence's, and not the database's own choice."""
    return {
        table: sorted(
            tuple(
                (column, repr(value))
                for column, value in row.items()
                if column not in FENCES.get(table, ()) and column != GENERATED.get(table)
            )
            for row in rows.values()
        )
        for table, rows in snapshot.items()
    }


def assert_stamped(shape: Shape, before: Snapshot, after: Snapshot) -> None:
    """Every fenced row that the shape wrote or added is mine, those it deleted are gone, the others as before."""
    for table in FENCES:
        writes, deletes = shape.writes.get(table, frozenset()), shape.deletes.get(table, frozenset())
        old, new = before[table], after[table]
        added = new.keys() - old.keys()
        assert old.keys() - new.keys() == deletes, f"rows gone from {table}"
        assert len(added) == shape.adds.get(table, 0), f"rows new in {table}"
        for key in writes | added:
            assert fence_in(table, new[key]) == MINE, f"{table} {key}"
        for key in old.keys() - writes - deletes:
            assert new[key] == old[key], f"{table} {key} was not to be written"


def assert_told(error: StaleToken, stored: Stamp, rows: Iterable[tuple[str, Key]]) -> None:
    """The error says whose row it is now, and which."""
    assert (error.table, error.identity) in list(rows)
    assert (error.token, error.holder) == MINE
    assert (error.stored_token, error.stored_holder) == stored
    assert error.resource == "r"
