"""What hostile reviews broke, each with the test that would have caught it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, registry, relationship

from fencing import (
    ConfigurationError,
    FencingError,
    Grant,
    StaleToken,
    UnguardedWrite,
    UnverifiableWrite,
    WrongResource,
)
from fencing.sql import (
    Fenced,
    FencedSession,
    GuardedRepository,
    fence,
    fence_columns,
    guarded,
    install,
    using,
)


def grant(token: int, holder: str, *resources: str) -> Grant:
    return Grant("test", resources or ("r",), holder * 32, token, 0.0)


OLD, NEW = grant(10, "a"), grant(20, "b")


class Base(DeclarativeBase):
    pass


pair = sa.Table(
    "review_pair",
    Base.metadata,
    sa.Column("row_id", sa.ForeignKey("review_row.id"), primary_key=True),
    sa.Column("tag_id", sa.ForeignKey("review_tag.id"), primary_key=True),
)


class Row(Fenced, Base):
    __tablename__ = "review_row"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(sa.String(20), default="row")
    code: Mapped[str] = mapped_column(sa.String(20), unique=True)
    touched: Mapped[int] = mapped_column(default=0, onupdate=777)
    tags: Mapped[list[Tag]] = relationship(secondary=pair)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "row"}  # noqa: RUF012


class Special(Row):
    __tablename__ = "review_special"
    id: Mapped[int] = mapped_column(sa.ForeignKey("review_row.id"), primary_key=True)
    extra: Mapped[int]
    __mapper_args__ = {"polymorphic_identity": "special"}  # noqa: RUF012


class Tag(Base):
    __tablename__ = "review_tag"
    id: Mapped[int] = mapped_column(primary_key=True)


class Owned(Fenced, Base):
    __tablename__ = "review_owned"
    __fence_resource__ = "owner:{owner}"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[int]
    value: Mapped[int] = mapped_column(default=0)


row, special, owned = Row.__table__, Special.__table__, Owned.__table__
ONE = grant(10, "a", "owner:1")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    """Rows 1 (old) and 2 (new) and special 3 (new); rows of two owners, all old."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/review.db", connect_args={"timeout": 0.1})
    Base.metadata.create_all(engine)
    with Session(engine) as session, guarded(session, OLD):
        session.add_all([Tag(id=1), Row(id=1, code="a")])
        session.commit()
    for who in (1, 2):
        with Session(engine) as session, guarded(session, grant(10, "a", f"owner:{who}")):
            session.add(Owned(id=who, owner=who))
            session.commit()
    with Session(engine) as session, guarded(session, NEW):
        session.add_all([Row(id=2, code="b"), Special(id=3, code="c", extra=1)])
        session.commit()
    yield engine
    engine.dispose()


def rows(engine: sa.Engine, table: sa.Table) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(each) for each in connection.execute(sa.select(table))]


def refused(
    engine: sa.Engine, statement: Any, who: Grant = OLD, error: type[FencingError] = FencingError
) -> None:
    before = [rows(engine, table) for table in Base.metadata.sorted_tables]
    with engine.connect() as connection, guarded(connection, who):
        with pytest.raises(error):
            connection.execute(*statement) if isinstance(statement, tuple) else connection.execute(statement)
        with contextlib.suppress(FencingError):
            connection.commit()
    assert [rows(engine, table) for table in Base.metadata.sorted_tables] == before


# Rows that are replaced unseen


def test_update_or_replace_is_refused(engine: sa.Engine) -> None:
    refused(engine, sa.update(row).prefix_with("OR REPLACE").where(row.c.id == 1).values(code="b"))


def test_insert_or_replace_into_a_subclass_table_is_refused(engine: sa.Engine) -> None:
    refused(engine, sa.insert(special).prefix_with("OR REPLACE").values(id=3, extra=99))


def test_table_whose_constraint_replaces_rows_cannot_be_fenced() -> None:
    table = sa.Table(
        "replacing",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("code", sa.String),
        sa.UniqueConstraint("code", sqlite_on_conflict="REPLACE"),
        *fence_columns(),
    )
    with pytest.raises(ConfigurationError, match="ON CONFLICT REPLACE"):
        fence(table)


# Rows that follow


def test_key_of_an_association_by_an_expression_is_refused(engine: sa.Engine) -> None:
    key = sa.select(row.c.id).where(row.c.code == "b").scalar_subquery()
    refused(engine, sa.insert(pair).values(row_id=key, tag_id=1), error=UnverifiableWrite)
    refused(engine, sa.insert(pair).values([{"row_id": sa.literal_column("2"), "tag_id": 1}]))


def test_association_is_followed_before_mappers_are_configured(tmp_path: Path) -> None:
    mappers = registry()
    joined = sa.Table(
        "early_pair",
        mappers.metadata,
        sa.Column("a", sa.ForeignKey("early.id"), primary_key=True),
        sa.Column("b", sa.ForeignKey("early_tag.id"), primary_key=True),
    )

    @mappers.mapped
    class Early(Fenced):
        __tablename__ = "early"
        id = sa.Column(sa.Integer, primary_key=True)
        tags = relationship("EarlyTag", secondary=joined)

    @mappers.mapped
    class EarlyTag:
        __tablename__ = "early_tag"
        id = sa.Column(sa.Integer, primary_key=True)

    engine = sa.create_engine(f"sqlite:///{tmp_path}/early.db")
    mappers.metadata.create_all(engine)
    install(engine)
    with engine.begin() as connection, guarded(connection, NEW):
        connection.execute(sa.insert(Early.__table__).values(id=1))
    with engine.connect() as connection, guarded(connection, OLD), pytest.raises(StaleToken):
        connection.execute(sa.insert(joined).values(a=1, b=1))
    engine.dispose()


def test_odd_mapping_is_no_trouble_for_other_tables(engine: sa.Engine) -> None:
    mappers = registry()
    links = sa.Table(
        "odd_link",
        mappers.metadata,
        sa.Column("badge", sa.ForeignKey("odd_sub.badge")),
        sa.Column("tag", sa.ForeignKey("odd_tag.id")),
    )

    @mappers.mapped
    class Odd(Fenced):
        __tablename__ = "odd"
        id = sa.Column(sa.Integer, primary_key=True)

    @mappers.mapped
    class Sub(Odd):
        __tablename__ = "odd_sub"
        id = sa.Column(sa.ForeignKey("odd.id"), primary_key=True)
        badge = sa.Column(sa.Integer, unique=True)
        tags = relationship("OddTag", secondary=links)

    @mappers.mapped
    class OddTag:
        __tablename__ = "odd_tag"
        id = sa.Column(sa.Integer, primary_key=True)

    mappers.configure()
    try:
        with Session(engine) as session:
            session.add(Tag(id=9))
            session.execute(sa.text("select 1"))
            session.commit()
        with engine.connect() as connection, guarded(connection, OLD):
            with pytest.raises(ConfigurationError, match="does not lead to"):
                connection.execute(sa.insert(links).values(badge=1, tag=1))
    finally:
        mappers.dispose()


def test_claim_changes_nothing_else(engine: sa.Engine) -> None:
    with Session(engine) as session:
        GuardedRepository(Row, session, NEW).claim(1)
        session.commit()
    with engine.connect() as connection:
        assert connection.execute(sa.select(row.c.touched, row.c.fence_token).filter_by(id=1)).one() == (
            0,
            20,
        )


def test_subclass_row_is_deleted_with_its_base(engine: sa.Engine) -> None:
    with Session(engine) as session:
        GuardedRepository(Row, session, NEW).delete(3)
        session.commit()
    assert rows(engine, special) == []


def test_another_description_of_a_fenced_table_is_refused_under_a_guard(engine: sa.Engine) -> None:
    light = sa.table("review_row", sa.column("id"), sa.column("code"))
    refused(engine, sa.update(light).where(light.c.id == 2).values(code="z"), error=UnverifiableWrite)
    reflected = sa.Table("review_row", sa.MetaData(), autoload_with=engine)
    refused(engine, sa.delete(reflected).where(reflected.c.id == 2), error=UnverifiableWrite)


def test_many_composite_keys_are_looked_at(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([Tag(id=n) for n in range(2, 1502)])
        session.commit()
    with Session(engine) as session, guarded(session, OLD):
        session.execute(sa.insert(pair), [{"row_id": 1, "tag_id": n} for n in range(2, 1502)])
        session.execute(sa.delete(pair).where(pair.c.row_id == 1))
        session.commit()
    assert rows(engine, pair) == []


# Resources


def test_alias_does_not_leave_its_resource(engine: sa.Engine) -> None:
    other = owned.alias()
    refused(engine, sa.update(other).where(other.c.id == 2).values(value=9), ONE, WrongResource)


def test_list_that_is_sent_is_the_one_that_is_checked(engine: sa.Engine) -> None:
    listed = owned.c.owner.in_(sa.bindparam("owners", [1], expanding=True))
    refused(engine, (sa.update(owned).where(listed).values(value=9), {"owners": [2]}), ONE, WrongResource)
    usual = owned.c.owner.in_(sa.bindparam("owners", expanding=True))
    with engine.begin() as connection, guarded(connection, ONE):
        assert (
            connection.execute(sa.update(owned).where(usual).values(value=9), {"owners": [1]}).rowcount == 1
        )


def test_ordered_values_do_not_move_a_row_out_of_its_lease(engine: sa.Engine) -> None:
    statement = sa.update(owned).where(owned.c.id == 1).ordered_values((owned.c.owner, 2), (owned.c.value, 5))
    refused(engine, statement, ONE, WrongResource)


# Refusals that were forgotten


def partly(connection: sa.Connection) -> None:
    """Something that is admitted, and something that is not."""
    connection.execute(sa.update(row).where(row.c.id == 1).values(code="partial"))
    with pytest.raises(StaleToken):
        connection.execute(sa.update(row).where(row.c.id == 2).values(code="stale"))


def test_guest_that_rolls_back_does_not_take_a_refusal_along(engine: sa.Engine) -> None:
    with engine.connect() as connection, guarded(connection, OLD):
        partly(connection)
        with Session(connection, join_transaction_mode="create_savepoint") as guest, guarded(guest, OLD):
            guest.execute(sa.select(1))
            guest.rollback()
        with pytest.raises(StaleToken):
            connection.commit()
    assert [each[2] for each in rows(engine, row)] == ["a", "b", "c"]


def test_session_bound_to_a_guarded_connection_by_table_is_refused(engine: sa.Engine) -> None:
    with engine.connect() as connection, guarded(connection, OLD):
        partly(connection)
        session = Session(binds={Row: connection}, join_transaction_mode="create_savepoint")
        with guarded(session, OLD), pytest.raises(ConfigurationError, match="guarded by itself"):
            session.get(Row, 1)
        session.close()
        with pytest.raises(StaleToken):
            connection.commit()


def test_guest_takes_the_lease_of_its_own_transaction(engine: sa.Engine) -> None:
    with engine.connect() as connection, connection.begin():
        with FencedSession(connection, join_transaction_mode="create_savepoint") as session:
            for token in (11, 12):
                with using(grant(token, "a")):
                    session.get_one(Row, 1).code = f"by {token}"
                    session.commit()
        assert connection.execute(sa.select(row.c.fence_token).filter_by(id=1)).scalar_one() == 12


def test_write_that_was_never_judged_is_not_committed(engine: sa.Engine) -> None:
    def trip(*_: Any) -> None:
        raise RuntimeError("a listener failed")

    with engine.connect() as connection, guarded(connection, OLD):
        event.listen(connection, "after_cursor_execute", trip)
        with pytest.raises(RuntimeError):
            connection.execute(sa.update(row).where(row.c.code >= "a").values(touched=5))
        with pytest.raises(UnverifiableWrite):
            connection.commit()
    assert all(each[3] == 0 for each in rows(engine, row))


def test_write_that_the_database_refused_is_no_trouble_for_the_next(engine: sa.Engine) -> None:
    with engine.connect() as connection, guarded(connection, OLD):
        with pytest.raises(sa.exc.IntegrityError):
            connection.execute(sa.update(row).where(row.c.id == 1).values(code="b"))
        connection.execute(sa.update(row).where(row.c.id == 1).values(code="z"))
        connection.commit()
    assert rows(engine, row)[0][2] == "z"


def test_busy_database_is_begun_again(engine: sa.Engine) -> None:
    """With the driver's own transactions off, a BEGIN that was skipped would leave every write committed."""
    alone = sa.create_engine(engine.url, connect_args={"timeout": 0.05, "isolation_level": None})
    with alone.connect() as connection, guarded(connection, OLD):
        with engine.connect() as busy:
            busy.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(OperationalError, match="locked"):
                connection.execute(sa.update(row).where(row.c.id == 1).values(code="x"))
            busy.rollback()
        connection.execute(sa.update(row).where(row.c.id == 1).values(code="x"))
        connection.rollback()
    alone.dispose()
    assert rows(engine, row)[0][2] == "a"


# Settings


def test_settings_are_those_of_the_dialect(engine: sa.Engine) -> None:
    fresh = sa.create_engine(engine.url)
    install(fresh.execution_options(isolation_level="SERIALIZABLE"))
    install(fresh, unguarded="warn", observers=[])
    with fresh.begin() as connection:
        connection.execute(sa.update(row).where(row.c.id == 1).values(code="warned"))
    install(fresh, unguarded="refuse")
    with fresh.begin() as connection, pytest.raises(UnguardedWrite):
        connection.execute(sa.update(row).where(row.c.id == 1).values(code="refused"))
    fresh.dispose()


def test_fence_that_lacks_a_column_marks_none() -> None:
    table = sa.Table(
        "half", sa.MetaData(), sa.Column("id", sa.Integer), sa.Column("fence_token", sa.BigInteger)
    )
    with pytest.raises(ConfigurationError, match="no column 'fence_holder'"):
        fence(table)
    assert table.c.fence_token.info == {}


# MariaDB


@pytest.fixture
def mariadb(mariadb_database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(mariadb_database_url)
    Base.metadata.create_all(engine)
    with Session(engine) as session, guarded(session, OLD):
        session.add(Row(id=1, code="a"))
        session.commit()
    with Session(engine) as session, guarded(session, NEW):
        session.add_all([Row(id=2, code="b"), Special(id=3, code="c", extra=1)])
        session.commit()
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    "text",
    [
        "START TRANSACTION",
        "BEGIN",
        "CREATE TABLE zz (i int)",
        "SET autocommit=1",
        "# x\nCOMMIT",
        "/*! COMMIT */",
    ],
)
def test_what_commits_on_mariadb_is_refused(mariadb: sa.Engine, text: str) -> None:
    with mariadb.connect() as connection, guarded(connection, OLD):
        partly(connection)
        with pytest.raises(ConfigurationError, match="ends the transaction"):
            connection.exec_driver_sql(text)
        connection.rollback()
    assert rows(mariadb, row)[0][2] == "a"


def test_definition_that_commits_on_mariadb_is_refused(mariadb: sa.Engine) -> None:
    with mariadb.connect() as connection, guarded(connection, OLD):
        partly(connection)
        with pytest.raises(ConfigurationError, match="ends the transaction"):
            sa.Table("zz", sa.MetaData(), sa.Column("i", sa.Integer)).create(connection, checkfirst=False)
        connection.rollback()
    assert rows(mariadb, row)[0][2] == "a"


def test_update_of_several_tables_does_not_reach_one_that_follows(mariadb: sa.Engine) -> None:
    tag = Tag.__table__
    statement = sa.update(tag).where(tag.c.id == special.c.id).values({special.c.extra: 99})
    refused(mariadb, statement, error=UnverifiableWrite)


def test_upsert_by_an_unknown_unique_value_is_refused(mariadb: sa.Engine) -> None:
    statement = mysql.insert(row).values(id=9, kind="row", touched=0, code=sa.func.lower("B"))
    refused(mariadb, statement.on_duplicate_key_update(touched=5), error=UnverifiableWrite)


# Reading text and templates


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, copy FROM review_row",
        "CREATE TABLE zzz (i int references review_row(id) ON DELETE CASCADE)",
        "SELECT * FROM review_row FOR UPDATE",
    ],
)
def test_text_that_writes_to_no_row_is_not_taken_for_a_write(text: str) -> None:
    from fencing.sql.raw import written

    assert written(text) is None
    assert written("DELETE FROM review_row") == "review_row"


def test_template_that_is_no_name_or_can_be_read_in_two_ways_is_refused() -> None:
    from fencing.sql.resource import Template

    table = sa.Table("read", sa.MetaData(), sa.Column("a", sa.String), sa.Column("b", sa.String))
    with pytest.raises(ConfigurationError):
        Template.of("x:{a-b}", table, None)
    both = Template.of("x:{a}:{b}", table, None)
    assert both.values(["x:1:2"]) == [("1", "2")]
    assert both.values(["x:1:2:3"]) == []


def test_fence_columns_that_are_added_late_count(engine: sa.Engine) -> None:
    table = sa.Table("review_late", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    with engine.begin() as connection:
        table.create(connection)
        connection.execute(sa.insert(table), {"id": 1})
    for column in fence_columns():
        table.append_column(column)
    with engine.begin() as connection, pytest.raises(UnguardedWrite):
        connection.execute(sa.delete(table))


def test_write_to_a_table_that_follows_needs_its_claim(engine: sa.Engine) -> None:
    """A listener that puts another statement in its place has claimed nothing."""
    with engine.connect() as connection, guarded(connection, NEW):

        def swap(connection: Any, statement: Any, multiparams: Any, params: Any, options: Any) -> Any:
            return (sa.delete(pair) if statement.is_dml else statement), multiparams, params

        event.listen(connection, "before_execute", swap, retval=True)
        with pytest.raises(UnverifiableWrite):
            connection.execute(sa.delete(pair).where(pair.c.row_id == 1, pair.c.tag_id == 1))


def test_parameter_of_the_guards_name_is_no_guard(engine: sa.Engine) -> None:
    statement = sa.update(row).where(row.c.id == sa.bindparam("fencing_token")).values(code="x")
    with engine.begin() as connection, pytest.raises(UnguardedWrite):
        connection.execute(statement, {"fencing_token": 1})
