"""Every way to say that a table is fenced, and what its rows belong to: each is guarded alike."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from sql.scene import emptied, grant, own_database
from sqlalchemy import Column, Engine, ForeignKey, Integer, MetaData, String, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.declarative import ConcreteBase
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    configure_mappers,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import NullPool
from sqlmodel import Field, SQLModel

from fencing import (
    ConfigurationError,
    Grant,
    StaleToken,
    UnguardedWrite,
    UnverifiableWrite,
    WrongResource,
)
from fencing.sql import Fenced, fence, fence_columns, guarded, install, unguarded
from fencing.sql.fence import fence_of

OLD, NEW = grant(10, "job:1"), grant(20, "job:1")


class Place:
    """An empty database: an engine with the guard, and one that has never heard of it."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url)
        install(self.engine)
        self.outside = sa.create_engine(url, poolclass=NullPool)

    @property
    def kind(self) -> str:
        return self.engine.dialect.name

    def make(self, metadata: MetaData, outside: Engine | None = None) -> None:
        metadata.create_all(outside or self.outside)

    def do(self, *statements: Any) -> list[Any]:
        """Carry statements out as somebody who has never heard of fencing; the rows of the last one."""
        with self.outside.begin() as connection:
            for statement in statements:
                result = connection.execute(statement)
            return list(result) if result.returns_rows else []

    def close(self) -> None:
        self.engine.dispose()
        self.outside.dispose()


@pytest.fixture(scope="module")
def own_url(postgres_url: str) -> Iterator[str]:
    with own_database(postgres_url) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from opened(request, request.param)


@pytest.fixture
def lite(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from opened(request, "sqlite")


@pytest.fixture
def pg(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from opened(request, "postgresql")


def opened(request: pytest.FixtureRequest, kind: str) -> Iterator[Place]:
    if kind == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path')}/mapped.db"
    else:
        url = emptied(request.getfixturevalue("own_url"))
    place = Place(url)
    yield place
    place.close()


# Declarations


@dataclass
class Case:
    """One declaration: a mapped class, or a table alone. It has a column `state`, and rows are keyed by `key`."""

    metadata: MetaData
    model: Any = None
    table: Any = None
    """Where the state is."""
    fenced: Any = None
    """Where the fence is."""
    registry: registry | None = None
    key: dict[str, Any] = field(default_factory=lambda: {"id": 1})
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    kept: bool = False
    """It stays mapped when the test is over."""

    def __post_init__(self) -> None:
        if self.table is None:
            self.table = self.model.__table__
        if self.fenced is None:
            self.fenced = self.table

    def engine(self, engine: Engine) -> Engine:
        return engine.execution_options(**self.options) if self.options else engine

    def add(self, session: Session) -> None:
        if self.model is None:
            session.execute(self.table.insert().values(**self.key, state="new"))
        else:
            session.add(self.model(**self.key, state="new"))
            session.flush()

    def change(self, session: Session) -> None:
        if self.model is None:
            session.execute(self.table.update().where(self.mine(self.table)).values(state="changed"))
        else:
            session.get(self.model, tuple(self.key.values())).state = "changed"
            session.flush()

    def remove(self, session: Session) -> None:
        if self.model is None:
            session.execute(self.table.delete().where(self.mine(self.table)))
        else:
            session.delete(session.get(self.model, tuple(self.key.values())))
            session.flush()

    def mine(self, table: Any) -> Any:
        return sa.and_(*(table.c[name] == value for name, value in self.key.items()))

    def stored(self, place: Place) -> list[Any]:
        """State, token and holder as they are in the database."""
        found = fence_of(self.fenced)
        query = sa.select(self.table.c.state, found.token, found.holder).where(self.mine(self.table))
        if self.table is not self.fenced:
            query = query.where(self.table.c.id == self.fenced.c.id)
        with self.engine(place.outside).connect() as connection:
            return [(state, token, as_hex(holder)) for state, token, holder in connection.execute(query)]

    def overtake(self, place: Place, by: Grant) -> None:
        found = fence_of(self.fenced)
        values = {found.token: by.token, found.holder: as_stored(found.holder.type, by.holder)}
        with self.engine(place.outside).begin() as connection:
            connection.execute(self.fenced.update().values(values))


def as_stored(kind: Any, holder: str) -> Any:
    if not isinstance(kind, sa.Uuid):
        return holder
    return uuid.UUID(holder) if kind.as_uuid else str(uuid.UUID(holder))


def as_hex(holder: Any) -> str:
    return holder.hex if isinstance(holder, uuid.UUID) else holder.replace("-", "")


def new_base() -> type[DeclarativeBase]:
    return type("Base", (DeclarativeBase,), {})


def of(model: Any, **more: Any) -> Case:
    return Case(model.metadata, model, registry=model.registry, **more)


def mixin() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job)


def mixin_on_the_base() -> Case:
    class Base(Fenced, DeclarativeBase): ...

    class Job(Base):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job)


def abstract_base() -> Case:
    class Durable(Fenced, new_base()):
        __abstract__ = True
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(Durable):
        __tablename__ = "job"
        state: Mapped[str]

    return of(Job)


def columns_of_other_names() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        __fence_columns__ = ("newest", "of whom")
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    assert set(Job.__table__.c.keys()) == {"id", "state", "newest", "of whom"}
    return of(Job)


def attributes_of_other_names() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column("State of the job", key="state")

    return of(Job)


def dataclass_base() -> Case:
    class Base(MappedAsDataclass, DeclarativeBase): ...

    class Job(Fenced, Base):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="new")

    assert [each.name for each in dataclasses.fields(Job)] == ["id", "state"]
    return of(Job)


def dataclass_by_decorator() -> Case:
    mappers = registry()

    @mappers.mapped_as_dataclass
    class Job(Fenced):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="new")

    return Case(mappers.metadata, Job, registry=mappers)


def mapped_by_decorator() -> Case:
    mappers = registry()

    @mappers.mapped
    class Job(Fenced):
        __tablename__ = "job"
        id = Column(Integer, primary_key=True)
        state = Column(String(20))

    return Case(mappers.metadata, Job, registry=mappers)


def legacy_base() -> Case:
    Base = declarative_base()

    class Job(Fenced, Base):
        __tablename__ = "job"
        id = Column(Integer, primary_key=True)
        state = Column(String(20))

    return of(Job)


def job_table(metadata: MetaData, *more: Any, **options: Any) -> Table:
    columns = more or fence_columns()
    return Table(
        "job",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("state", String(20)),
        *columns,
        **options,
    )


def imperative() -> Case:
    mappers = registry()

    class Job:
        def __init__(self, **values: Any) -> None:
            for name, value in values.items():
                setattr(self, name, value)

    mappers.map_imperatively(Job, job_table(mappers.metadata))
    return Case(mappers.metadata, Job, registry=mappers)


def declarative_with_a_table() -> Case:
    base = new_base()

    class Job(base):
        __table__ = job_table(base.metadata)

    return of(Job)


def sqlmodel() -> Case:
    class Base(SQLModel, registry=registry()): ...

    class Job(Fenced, Base, table=True):
        id: int | None = Field(default=None, primary_key=True)
        state: str = "new"

    return Case(Job.metadata, Job, registry=Job._sa_registry)


def sqlmodel_with_columns() -> Case:
    class Base(SQLModel, registry=registry()): ...

    token, holder = fence_columns()

    class Job(Base, table=True):
        id: int | None = Field(default=None, primary_key=True)
        state: str = "new"
        fence_token: int | None = Field(default=None, sa_column=token)
        fence_holder: uuid.UUID | None = Field(default=None, sa_column=holder)

    return Case(Job.metadata, Job, registry=Job._sa_registry)


def joined() -> Case:
    class Work(Fenced, new_base()):
        __tablename__ = "work"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Job(Work):
        __tablename__ = "job"
        __mapper_args__ = {"polymorphic_identity": "job"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey("work.id"), primary_key=True)
        state: Mapped[str]

    assert "fence_token" not in Job.__table__.c
    return of(Job, fenced=Work.__table__)


def joined_twice() -> Case:
    class Work(Fenced, new_base()):
        __tablename__ = "work"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Task(Work):
        __tablename__ = "task"
        __mapper_args__ = {"polymorphic_identity": "task"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey("work.id"), primary_key=True)
        title: Mapped[str | None]

    class Job(Task):
        __tablename__ = "job"
        __mapper_args__ = {"polymorphic_identity": "job"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey("task.id"), primary_key=True)
        state: Mapped[str]

    return of(Job, fenced=Work.__table__)


def single_table() -> Case:
    class Work(Fenced, new_base()):
        __tablename__ = "work"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Job(Work):
        __mapper_args__ = {"polymorphic_identity": "job"}  # noqa: RUF012
        state: Mapped[str | None]

    return of(Job)


def concrete() -> Case:
    class Work(Fenced, new_base()):
        __tablename__ = "work"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(Work):
        __tablename__ = "job"
        __mapper_args__ = {"concrete": True}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job)


def concrete_base() -> Case:
    class Work(Fenced, ConcreteBase, new_base()):
        __tablename__ = "work"
        __mapper_args__ = {"polymorphic_identity": "work", "concrete": True}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(Work):
        __tablename__ = "job"
        __mapper_args__ = {"polymorphic_identity": "job", "concrete": True}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job, kept=True)  # SQLAlchemy 2.0 comes back to the class whenever mappers are configured


def composite_key() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        house: Mapped[int] = mapped_column(primary_key=True)
        number: Mapped[str] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job, key={"house": 3, "number": "seven"})


def in_a_schema() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        __table_args__ = {"schema": "area"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job)


def in_a_translated_schema() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        __table_args__ = {"schema": "tenant"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    return of(Job, options={"schema_translate_map": {"tenant": "area"}})


def translated_away() -> Case:
    case = in_a_translated_schema()
    case.options = {"schema_translate_map": {"tenant": None}}
    return case


def version_of_their_own() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]
        version: Mapped[int] = mapped_column()
        __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    return of(Job)


def server_side_version() -> Case:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]
        version: Mapped[uuid.UUID] = mapped_column()
        __mapper_args__ = {  # noqa: RUF012
            "version_id_col": version,
            "version_id_generator": lambda _: uuid.uuid4(),
        }

    return of(Job)


def core() -> Case:
    metadata = MetaData()
    return Case(metadata, table=job_table(metadata))


def core_with_other_names() -> Case:
    metadata = MetaData()
    return Case(metadata, table=job_table(metadata, *fence_columns(token="newest", holder="of_whom")))


def copied() -> Case:
    metadata = MetaData()
    return Case(metadata, table=job_table(MetaData()).to_metadata(metadata))


def mixin_copied() -> Case:
    metadata = MetaData()
    return Case(metadata, table=mixin().table.to_metadata(metadata, name="job_copy"))


def holder_as_text() -> Case:
    metadata = MetaData()
    table = job_table(
        metadata,
        Column("fence_token", sa.BigInteger, nullable=False, server_default="0"),
        Column("fence_holder", String(32), nullable=False, server_default="0" * 32),
    )
    return Case(metadata, table=fence(table))


def holder_as_uuid_text() -> Case:
    metadata = MetaData()
    table = job_table(
        metadata,
        Column("fence_token", sa.BigInteger, nullable=False, server_default="0"),
        Column("fence_holder", sa.Uuid(as_uuid=False), nullable=False, server_default=str(uuid.UUID(int=0))),
    )
    return Case(metadata, table=fence(table))


def holder_as_characters() -> Case:
    metadata = MetaData()
    table = job_table(
        metadata,
        Column("fence_token", sa.BigInteger, nullable=False, server_default="0"),
        Column("fence_holder", sa.Uuid(native_uuid=False), nullable=False, server_default="0" * 32),
    )
    return Case(metadata, table=fence(table))


DECLARATIONS: list[Callable[[], Case]] = [
    mixin,
    mixin_on_the_base,
    abstract_base,
    columns_of_other_names,
    attributes_of_other_names,
    dataclass_base,
    dataclass_by_decorator,
    mapped_by_decorator,
    legacy_base,
    imperative,
    declarative_with_a_table,
    sqlmodel,
    sqlmodel_with_columns,
    joined,
    joined_twice,
    single_table,
    concrete,
    concrete_base,
    composite_key,
    in_a_schema,
    in_a_translated_schema,
    translated_away,
    version_of_their_own,
    server_side_version,
    core,
    core_with_other_names,
    copied,
    mixin_copied,
    holder_as_text,
    holder_as_uuid_text,
    holder_as_characters,
]


@pytest.fixture(params=DECLARATIONS, ids=lambda declare: declare.__name__)
def case(request: pytest.FixtureRequest, place: Place) -> Iterator[Case]:
    if place.kind == "sqlite" and request.param in (in_a_schema, in_a_translated_schema):
        pytest.skip("SQLite has no schemas")
    case, why = declared_or_not(request.param)
    if case is None:
        pytest.fail(why)
    place.make(case.metadata, case.engine(place.outside))
    yield case
    if case.registry is not None and not case.kept:
        case.registry.dispose()


def declared_or_not(declare: Callable[[], Case]) -> tuple[Case | None, str]:
    """The declaration, or why it could not be; nothing is left of it then that could disturb other tests."""
    try:
        case = declare()
        if case.registry is not None:
            case.registry.configure()
        return case, ""
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        why = repr(error)
    gc.collect()
    return None, why


def test_a_fresh_holder_inserts_updates_and_deletes(place: Place, case: Case) -> None:
    with Session(case.engine(place.engine)) as session, guarded(session, OLD):
        case.add(session)
        session.commit()
        assert case.stored(place) == [("new", OLD.token, OLD.holder)]
        case.change(session)
        session.commit()
        assert case.stored(place) == [("changed", OLD.token, OLD.holder)]
    with Session(case.engine(place.engine)) as session, guarded(session, NEW):
        case.change(session)
        session.commit()
        if case.stored(place)[0][1] != NEW.token:  # the unit of work had nothing to write
            session.execute(sa.update(case.table).values(state="changed again"))
            session.commit()
        assert case.stored(place)[0][1:] == (NEW.token, NEW.holder)
        case.remove(session)
        session.commit()
    assert case.stored(place) == []


@pytest.mark.parametrize("newer", [NEW, grant(OLD.token)], ids=["newer", "same token"])
def test_a_stale_holder_is_refused(place: Place, case: Case, newer: Grant) -> None:
    with Session(case.engine(place.engine)) as session, guarded(session, OLD):
        case.add(session)
        session.commit()
        case.overtake(place, newer)
        for verb in (case.change, case.remove):
            with pytest.raises(StaleToken) as refused:
                verb(session)
            with pytest.raises(sa.exc.PendingRollbackError) if case.model else pytest.raises(StaleToken):
                session.commit()
            session.rollback()
            error = refused.value
            assert (error.stored_token, error.stored_holder) == (newer.token, newer.holder)
            assert (error.table, error.identity) == (case.fenced.fullname, tuple(case.key.values()))
            assert case.stored(place) == [("new", newer.token, newer.holder)]


def test_a_stale_holder_is_refused_by_criteria(place: Place, case: Case) -> None:
    with Session(case.engine(place.engine)) as session, guarded(session, OLD):
        case.add(session)
        session.commit()
        case.overtake(place, NEW)
        # SQLAlchemy takes no UPDATE of a class that is selected from a union.
        mapped = case.model is not None and isinstance(sa.inspect(case.model).selectable, Table | sa.Join)
        target = case.model if mapped else case.table
        state = target.state if mapped else case.table.c.state
        for statement in (
            sa.update(target).where(state == "new").values(state="stale"),
            sa.delete(target).where(state == "new"),
        ):
            if case.table is not case.fenced and statement.is_delete:
                continue  # the ORM deletes by criteria from the subclass's table alone
            with pytest.raises(StaleToken):
                session.execute(statement, execution_options={"synchronize_session": False})
            session.rollback()
    assert case.stored(place) == [("new", NEW.token, NEW.holder)]


def test_without_a_guard_it_is_refused(place: Place, case: Case) -> None:
    names = {case.fenced.fullname, case.table.fullname}
    with Session(case.engine(place.engine)) as session:
        with pytest.raises(UnguardedWrite) as refused:
            case.add(session)
        assert refused.value.table in names
        session.rollback()
        with guarded(session, OLD):
            case.add(session)
            session.commit()
        for verb in (case.change, case.remove):
            with pytest.raises(UnguardedWrite) as refused:
                verb(session)
            assert refused.value.table in names
            session.rollback()
    assert case.stored(place) == [("new", OLD.token, OLD.holder)]


def test_a_row_that_was_there_before_the_fence_belongs_to_nobody(place: Place, case: Case) -> None:
    with Session(case.engine(place.outside)) as session:
        case.add(session)
        session.commit()
    assert case.stored(place) == [("new", 0, "0" * 32)]
    with Session(case.engine(place.engine)) as session, guarded(session, grant(1)):
        case.change(session)
        session.commit()
    assert case.stored(place)[0][:2] == ("changed", 1)


def test_a_reflected_table_is_declared_fenced(place: Place) -> None:
    place.make(core().metadata)
    table = fence(Table("job", MetaData(), autoload_with=place.outside))
    case = Case(table.metadata, table=table)
    with Session(place.engine) as session:
        with guarded(session, OLD):
            case.add(session)
            session.commit()
        assert case.stored(place) == [("new", OLD.token, OLD.holder)]
        case.overtake(place, NEW)
        with guarded(session, OLD):
            with pytest.raises(StaleToken) as refused:
                case.change(session)
            session.rollback()
        assert refused.value.stored_holder == NEW.holder
        with pytest.raises(UnguardedWrite):
            case.change(session)


def test_a_reflected_table_that_nobody_declared_is_not_fenced(lite: Place) -> None:
    lite.make(core().metadata)
    table = Table("job", MetaData(), autoload_with=lite.outside)
    with Session(lite.engine) as session:
        session.execute(table.insert().values(id=1, state="new"))
        session.commit()
    assert fence_of(table) is None


def test_a_table_that_is_reflected_is_fenced_by_a_declaration_of_its_class(place: Place) -> None:
    place.make(core().metadata)
    base = new_base()

    class Job(base):
        __table__ = fence(Table("job", base.metadata, autoload_with=place.outside))

    case = of(Job)
    with Session(place.engine) as session, guarded(session, OLD):
        case.add(session)
        session.commit()
        case.overtake(place, NEW)
        with pytest.raises(StaleToken):
            case.change(session)
    Job.registry.dispose()


ABSTRACT = """
import sqlalchemy as sa
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from fencing import Grant, StaleToken, UnguardedWrite
from fencing.sql import Fenced, guarded

class Base(DeclarativeBase): ...

class Work(Fenced, AbstractConcreteBase, Base):
    strict_attrs = True

class Job(Work):
    __tablename__ = "job"
    __mapper_args__ = {"polymorphic_identity": "job", "concrete": True}
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]

engine = sa.create_engine("sqlite://")
Base.metadata.create_all(engine)
old, new = (Grant("work", ("job:1",), "%032x" % token, token, 0.0) for token in (10, 20))
with Session(engine) as session:
    for lease in (old, new):
        with guarded(session, lease):
            session.merge(Job(id=1, state=str(lease.token)))
            session.commit()
    for lease, expected in ((old, StaleToken), (None, UnguardedWrite)):
        try:
            with guarded(session, lease) if lease else session.no_autoflush:
                session.get(Job, 1).state = "stale"
                session.commit()
        except expected:
            session.rollback()
        else:
            raise SystemExit(f"{lease} was admitted")
    assert session.get(Job, 1).state == "20"
engine.dispose()
"""


def test_an_abstract_concrete_base_is_guarded() -> None:
    # In a process of its own: a class that cannot be mapped there would stand in the way of all others.
    done = subprocess.run([sys.executable, "-c", ABSTRACT], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_fence_is_not_loaded_with_the_row(lite: Place) -> None:
    model = mixin().model
    assert "fence_token" not in str(sa.select(model))
    model.registry.dispose()


def test_a_class_that_says_so_over_a_table_that_has_it(lite: Place) -> None:
    mappers = registry()

    class Job(Fenced): ...

    mappers.map_imperatively(Job, job_table(mappers.metadata))
    mappers.configure()
    lite.make(mappers.metadata)
    with Session(lite.engine) as session:
        with pytest.raises(UnguardedWrite):
            session.execute(sa.insert(Job).values(id=1, state="new"))
    mappers.dispose()


# Declarations that cannot be


@contextlib.contextmanager
def declared(model: Any) -> Iterator[None]:
    """Configure the mappers of the model; they are gone at the end."""
    try:
        yield model.registry.configure()
    finally:
        model.registry.dispose()


@pytest.mark.parametrize("part", [0, 1])
def test_one_fence_column_alone_is_refused(lite: Place, part: int) -> None:
    metadata = MetaData()
    table = job_table(metadata, fence_columns()[part])
    lite.make(metadata)
    with Session(lite.engine) as session, guarded(session, OLD):
        with pytest.raises(ConfigurationError, match="only one of the two"):
            session.execute(table.insert().values(id=1, state="new"))


@pytest.mark.parametrize("missing", ["fence_token", "fence_holder"])
def test_a_table_without_the_columns_cannot_be_declared(missing: str) -> None:
    there = [Column(name, String) for name in ("fence_token", "fence_holder") if name != missing]
    with pytest.raises(ConfigurationError, match=missing):
        fence(job_table(MetaData(), *there))


def test_a_class_that_says_so_over_a_table_that_has_it_not_is_refused() -> None:
    mappers = registry()

    class Job(Fenced): ...

    mappers.map_imperatively(Job, job_table(mappers.metadata, Column("more", Integer)))
    with pytest.raises(ConfigurationError, match="no fence columns"):
        mappers.configure()
    mappers.dispose()


BAD = [
    ("job:{nope}", "has no column 'nope'"),
    ("job", "names no column"),
    ("", "names no column"),
    ("job:{{id}}", "names no column"),
    ("job:{id:05d}", "as they are"),
    ("job:{id!r}", "as they are"),
    ("job:{id", "no template"),
    ("job:{}", "takes columns as they are"),
    ("job:{id.real}", "takes columns as they are"),
    ("job:{id[0]}", "takes columns as they are"),
    ("job:{share}", "integers, text and UUIDs"),
    ("job:{made}", "integers, text and UUIDs"),
]


@pytest.mark.parametrize(("template", "why"), BAD)
def test_a_template_that_cannot_be_is_refused_for_a_class(template: str, why: str) -> None:
    class Job(Fenced, new_base()):
        __tablename__ = "job"
        __fence_resource__ = template
        id: Mapped[int] = mapped_column(primary_key=True)
        share: Mapped[float]
        made: Mapped[Any] = mapped_column(sa.DateTime)

    with pytest.raises(ConfigurationError, match=why), declared(Job):
        pass


@pytest.mark.parametrize(("template", "why"), BAD)
def test_a_template_that_cannot_be_is_refused_for_a_table(template: str, why: str) -> None:
    def table(**options: Any) -> Table:
        return job_table(
            MetaData(), Column("share", sa.Float), Column("made", sa.DateTime), *fence_columns(**options)
        )

    with pytest.raises(ConfigurationError, match=why):
        fence(table(), resource=template)
    with pytest.raises(ConfigurationError, match=why):
        fence_of(table(resource=template))


def test_a_concrete_subclass_that_says_so_late_is_fenced_or_refused() -> None:
    class Work(Fenced, new_base()):
        __tablename__ = "work"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(Work):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)

        @declared_attr.directive
        def __mapper_args__(cls) -> dict[str, Any]:
            return {"concrete": True}

    with contextlib.suppress(ConfigurationError), declared(Job):
        assert fence_of(Job.__table__) is not None


def test_a_class_that_could_not_be_mapped_is_nobody_else_s_trouble(lite: Place) -> None:
    base = new_base()
    with pytest.raises(sa.exc.ArgumentError) as kept:

        class Keyless(base):
            __tablename__ = "keyless"
            state: Mapped[str]

    case = joined()
    lite.make(case.metadata)
    with Session(lite.engine) as session, guarded(session, OLD):
        case.add(session)
        session.commit()
    assert case.stored(lite) == [("new", OLD.token, OLD.holder)]
    traceback.clear_frames(kept.tb)
    base.registry.dispose()
    case.registry.dispose()


def test_a_bad_declaration_elsewhere_is_nobody_else_s_trouble(lite: Place) -> None:
    class Broken(Fenced, new_base()):
        __tablename__ = "broken"
        __fence_resource__ = "job:{nope}"
        id: Mapped[int] = mapped_column(primary_key=True)

    case = joined()
    lite.make(case.metadata)
    with Session(lite.engine) as session, guarded(session, OLD):
        case.add(session)
        case.change(session)
        session.commit()
    assert case.stored(lite) == [("changed", OLD.token, OLD.holder)]
    Broken.registry.dispose()
    case.registry.dispose()


# What a row belongs to


class Belonging(DeclarativeBase): ...


linked = Table(
    "belonging_linked",
    Belonging.metadata,
    Column("ticket_id", ForeignKey("belonging_ticket.id"), primary_key=True),
    Column("tag_id", ForeignKey("belonging_tag.id"), primary_key=True),
)


class Ticket(Fenced, Belonging):
    __tablename__ = "belonging_ticket"
    __fence_resource__ = "ticket:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    tags: Mapped[list[Tag]] = relationship(secondary=linked)


class Tag(Fenced, Belonging):
    __tablename__ = "belonging_tag"
    __fence_resource__ = "tag:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Payment(Fenced, Belonging):
    """Tied to a resource by a column that is not its key."""

    __tablename__ = "belonging_payment"
    __fence_resource__ = "customer:{customer_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int]
    state: Mapped[str]


class Document(Fenced, Belonging):
    __tablename__ = "belonging_document"
    __fence_resource__ = "document:{id}"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    state: Mapped[str]


class Page(Fenced, Belonging):
    __tablename__ = "belonging_page"
    __fence_resource__ = "document:{document_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[uuid.UUID]
    state: Mapped[str]


class Shelf(Fenced, Belonging):
    """A resource of two columns, one of them text, under another attribute's name."""

    __tablename__ = "belonging_shelf"
    __fence_resource__ = "shelf:{house}/{label}"
    house: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column("name", primary_key=True)
    state: Mapped[str]


class Work(Fenced, Belonging):
    __tablename__ = "belonging_work"
    __fence_resource__ = "work:{id}"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


class Print(Work):
    __tablename__ = "belonging_print"
    __mapper_args__ = {"polymorphic_identity": "print"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(ForeignKey("belonging_work.id"), primary_key=True)
    state: Mapped[str]


FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)


@pytest.fixture
def filled(place: Place) -> Place:
    return fill(place)


def fill(place: Place) -> Place:
    """Two of each, and two payments for each of the customers 7 and 8."""
    place.make(Belonging.metadata)
    with Session(place.outside) as session:
        for n in (1, 2):
            session.add_all([Ticket(id=n, state="open"), Tag(id=n, state="open"), Print(id=n, state="open")])
        session.add_all(Payment(id=n, customer_id=7 + n // 3, state="open") for n in (1, 2, 3, 4))
        session.add_all([Document(id=FIRST, state="open"), Document(id=SECOND, state="open")])
        session.add_all(Page(id=n, document_id=d, state="open") for n, d in ((1, FIRST), (2, SECOND)))
        session.add_all([Shelf(house=1, label="a", state="open"), Shelf(house=1, label="b", state="open")])
        session.commit()
    return place


def tokens(place: Place, model: Any) -> list[int]:
    table = model.__table__
    return [row[0] for row in place.do(sa.select(table.c.fence_token).order_by(*table.primary_key))]


def states(place: Place, model: Any) -> list[str]:
    table = model.__table__
    return [row[0] for row in place.do(sa.select(table.c.state).order_by(*table.primary_key))]


def insert(place: Place, model: Any) -> Any:
    return {"sqlite": sqlite, "postgresql": postgresql}[place.kind].insert(model)


@contextlib.contextmanager
def under(place: Place, *resources: str, token: int = 10) -> Iterator[Session]:
    with Session(place.engine) as session, guarded(session, grant(token, *resources)):
        yield session


def refused(session: Session, what: Callable[[], Any], *, flushed: bool = False) -> WrongResource:
    """What is told when it is refused; and the transaction cannot be committed."""
    with pytest.raises(WrongResource) as wrong:
        what()
    with pytest.raises(sa.exc.PendingRollbackError if flushed else WrongResource):
        session.commit()
    session.rollback()
    return wrong.value


def test_a_lease_on_the_row_s_resource_is_admitted(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        session.get(Ticket, 1).state = "flushed"
        session.commit()
        session.execute(sa.update(Ticket).where(Ticket.id == 1).values(state="by criteria"))
        session.execute(sa.delete(Ticket).where(Ticket.id == 1))
        session.add(Ticket(id=1, state="again"))
        session.commit()
        upsert = insert(filled, Ticket).values(id=1, state="upserted")
        session.execute(
            upsert.on_conflict_do_update(index_elements=["id"], set_={"state": upsert.excluded.state})
        )
        session.commit()
    assert states(filled, Ticket) == ["upserted", "open"]
    assert tokens(filled, Ticket) == [10, 0]


def test_a_lease_on_another_resource_cannot_flush_a_change(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        session.get(Ticket, 2).state = "x"
        error = refused(session, session.flush, flushed=True)
    assert (error.resource, error.table) == ("ticket:1", Ticket.__tablename__)
    assert "'ticket:2'" in str(error)
    assert tokens(filled, Ticket) == [0, 0]


def test_a_lease_on_another_resource_cannot_flush_a_delete(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        session.delete(session.get(Ticket, 2))
        refused(session, session.flush, flushed=True)
    assert states(filled, Ticket) == ["open", "open"]


def test_a_lease_on_another_resource_cannot_flush_a_new_row(filled: Place) -> None:
    with under(filled, "ticket:3") as session:
        session.add_all([Ticket(id=3, state="new"), Ticket(id=4, state="new")])
        refused(session, session.flush, flushed=True)
    assert states(filled, Ticket) == ["open", "open"]


def test_a_batch_with_one_row_of_another_resource_is_refused(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        for ticket in session.scalars(sa.select(Ticket)).all():
            ticket.state = "x"
        refused(session, session.flush, flushed=True)
        refused(
            session,
            lambda: session.execute(sa.update(Ticket), [{"id": 1, "state": "x"}, {"id": 2, "state": "x"}]),
        )
        rows = [{"id": 1, "state": "x"}, {"id": 5, "state": "x"}]
        refused(session, lambda: session.execute(sa.insert(Ticket), rows))
        refused(session, lambda: session.execute(sa.insert(Ticket).values(rows)))
    assert states(filled, Ticket) == ["open", "open"]
    assert tokens(filled, Ticket) == [0, 0]


T = Ticket.__table__.c


@pytest.mark.parametrize(
    "criterion",
    [
        pytest.param(T.id == 1, id="equal"),
        pytest.param(sa.literal(1) == T.id, id="turned round"),
        pytest.param(T.id == sa.bindparam("which", 1), id="bound"),
        pytest.param(sa.and_(T.id == 1, T.state == "open"), id="and more"),
        pytest.param(T.id.in_([1]), id="in"),
        pytest.param(sa.and_(T.state == "open", T.id.in_([1])), id="in, and more"),
        pytest.param(sa.and_(T.state == "open", sa.and_(T.state != "x", T.id == 1)), id="nested"),
    ],
)
@pytest.mark.parametrize("verb", ["update", "delete"])
def test_criteria_that_carry_the_resource_are_admitted(filled: Place, verb: str, criterion: Any) -> None:
    with under(filled, "ticket:1") as session:
        for target in (Ticket.__table__, Ticket):
            statement = sa.update(target).values(state="x") if verb == "update" else sa.delete(target)
            assert session.execute(statement.where(criterion)).rowcount == 1
            session.rollback()


@pytest.mark.parametrize(
    "criterion",
    [
        pytest.param(T.id == 2, id="another"),
        pytest.param(T.id.in_([1, 2]), id="one of them another"),
        pytest.param(T.state == "open", id="by another column"),
        pytest.param(sa.true(), id="all"),
        pytest.param(sa.or_(T.id == 1, T.id == 2), id="or"),
        pytest.param(sa.or_(T.id == 1, T.state == "open"), id="or more"),
        pytest.param(T.id <= 1, id="range"),
        pytest.param(T.id != 1, id="not"),
        pytest.param(~(T.id == 1), id="negated"),
        pytest.param(T.id.not_in([2]), id="not in"),
        pytest.param(T.id.in_(sa.select(Tag.id)), id="in a query"),
        pytest.param(T.id == sa.select(sa.func.max(Tag.id)).scalar_subquery(), id="a query"),
        pytest.param(T.id + 1 == 1, id="an expression"),
        pytest.param(sa.text("id = 1"), id="text"),
    ],
)
@pytest.mark.parametrize("verb", ["update", "delete"])
def test_criteria_that_do_not_carry_the_resource_are_refused(
    filled: Place, verb: str, criterion: Any
) -> None:
    with under(filled, "ticket:1") as session:
        for target in (Ticket.__table__, Ticket):
            statement = sa.update(target).values(state="x") if verb == "update" else sa.delete(target)
            statement = statement.where(criterion).execution_options(synchronize_session=False)
            refused(session, lambda statement=statement: session.execute(statement))
    assert states(filled, Ticket) == ["open", "open"]
    assert tokens(filled, Ticket) == [0, 0]


def test_criteria_that_contradict_themselves_touch_nothing_of_others(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        statement = sa.update(Ticket).where(Ticket.id == 2, Ticket.id == 1).values(state="x")
        with contextlib.suppress(WrongResource):
            session.execute(statement)
            session.commit()
    assert states(filled, Ticket) == ["open", "open"]
    assert tokens(filled, Ticket) == [0, 0]


def test_an_upsert_of_another_resource_is_refused(filled: Place) -> None:
    upsert = insert(filled, Ticket)
    upsert = upsert.on_conflict_do_update(index_elements=["id"], set_={"state": upsert.excluded.state})
    with under(filled, "ticket:1") as session:
        refused(session, lambda: session.execute(upsert.values(id=2, state="x")))
        rows = [{"id": 1, "state": "x"}, {"id": 2, "state": "x"}]
        refused(session, lambda: session.execute(upsert, rows))
        refused(session, lambda: session.execute(upsert.values(rows)))
    assert states(filled, Ticket) == ["open", "open"]


def test_an_upsert_that_may_meet_a_row_of_another_resource_is_refused(filled: Place) -> None:
    upsert = insert(filled, Payment).values(id=3, customer_id=7, state="x")
    upsert = upsert.on_conflict_do_update(index_elements=["id"], set_={"state": "x"})
    with under(filled, "customer:7") as session:
        with pytest.raises(UnverifiableWrite):
            session.execute(upsert)
        with pytest.raises(UnverifiableWrite):
            session.commit()
    assert states(filled, Payment) == ["open"] * 4


def test_an_insert_from_a_query_is_refused(filled: Place) -> None:
    query = sa.select(Tag.id + 2, Tag.state)
    with under(filled, "ticket:3") as session:
        refused(session, lambda: session.execute(sa.insert(Ticket).from_select(["id", "state"], query)))


def test_one_lease_on_several_resources_is_admitted_for_each(filled: Place) -> None:
    with under(filled, "ticket:1", "ticket:2", "customer:7") as session:
        for ticket in session.scalars(sa.select(Ticket)):
            ticket.state = "both"
        session.get(Payment, 1).state = "paid"
        session.commit()
        session.execute(sa.update(Ticket).where(Ticket.id.in_([1, 2])).values(state="both again"))
        session.commit()
        session.get(Payment, 3).state = "x"
        refused(session, session.flush, flushed=True)
    assert states(filled, Ticket) == ["both again"] * 2
    assert states(filled, Payment) == ["paid", "open", "open", "open"]


def test_a_server_generated_key_is_refused_with_what_to_do(filled: Place) -> None:
    with under(filled, "ticket:3") as session:
        session.add(Ticket(state="new"))
        error = refused(session, session.flush, flushed=True)
        assert "give id" in str(error)
        refused(session, lambda: session.execute(sa.insert(Ticket).values(state="new")))
    assert states(filled, Ticket) == ["open", "open"]


@pytest.mark.parametrize(
    "resource", ["ticket:01", "ticket:1 ", "ticket: 1", "ticket:+1", "Ticket:1", "ticket:", "1"]
)
def test_a_resource_must_be_spelt_as_the_template_does(filled: Place, resource: str) -> None:
    with under(filled, resource) as session:
        refused(session, lambda: session.execute(sa.update(Ticket).where(Ticket.id == 1).values(state="x")))


# Tied by a column that is not the key


def test_a_row_tied_by_another_column_is_flushed_by_its_key(filled: Place) -> None:
    with under(filled, "customer:7") as session:
        session.get(Payment, 1).state = "paid"
        session.commit()
        session.delete(session.get(Payment, 2))
        session.add(Payment(id=5, customer_id=7, state="new"))
        session.commit()
    assert states(filled, Payment) == ["paid", "open", "open", "new"]
    assert tokens(filled, Payment) == [10, 0, 0, 10]


def test_a_row_of_another_customer_is_not_flushed(filled: Place) -> None:
    with under(filled, "customer:7") as session:
        session.get(Payment, 3).state = "x"
        error = refused(session, session.flush, flushed=True)
        assert error.identity == (3,)
        assert "'customer:8'" in str(error)
        session.delete(session.get(Payment, 4))
        refused(session, session.flush, flushed=True)
        session.add(Payment(id=5, customer_id=8, state="x"))
        refused(session, session.flush, flushed=True)
    assert states(filled, Payment) == ["open"] * 4
    assert tokens(filled, Payment) == [0] * 4


def test_a_batch_with_a_row_of_another_customer_is_not_flushed(filled: Place) -> None:
    with under(filled, "customer:7") as session:
        for payment in session.scalars(sa.select(Payment).where(Payment.id.in_([1, 3]))).all():
            payment.state = "x"
        refused(session, session.flush, flushed=True)
        rows = [{"id": 1, "state": "x"}, {"id": 3, "state": "x"}]
        refused(session, lambda: session.execute(sa.update(Payment), rows))
        for payment in session.scalars(sa.select(Payment).where(Payment.id.in_([1, 3]))).all():
            session.delete(payment)
        refused(session, session.flush, flushed=True)
    assert states(filled, Payment) == ["open"] * 4


def test_a_statement_by_key_is_held_to_the_customer(filled: Place) -> None:
    table = Payment.__table__
    with under(filled, "customer:7") as session:
        assert session.execute(table.update().where(table.c.id == 1).values(state="paid")).rowcount == 1
        session.commit()
        refused(session, lambda: session.execute(table.update().where(table.c.id == 3).values(state="x")))
        refused(session, lambda: session.execute(table.delete().where(table.c.id == 3)))
        where = table.c.customer_id == 7
        assert session.execute(table.update().where(where).values(state="all of 7")).rowcount == 2
        session.commit()
        refused(
            session, lambda: session.execute(table.update().where(table.c.state == "open").values(state="x"))
        )
    assert states(filled, Payment) == ["all of 7", "all of 7", "open", "open"]


def test_a_stale_row_tied_by_another_column_is_stale(filled: Place) -> None:
    newer = {"fence_token": 20, "fence_holder": uuid.uuid4()}
    filled.do(sa.update(Payment.__table__).values(newer))
    with under(filled, "customer:7") as session:
        session.get(Payment, 1).state = "x"
        with pytest.raises(StaleToken):
            session.flush()
        session.rollback()
        session.delete(session.get(Payment, 1))
        with pytest.raises(StaleToken):
            session.flush()


def test_a_missing_row_tied_by_another_column_is_missing(filled: Place) -> None:
    with under(filled, "customer:7") as session:
        session.get(Payment, 1).state = "x"
        with unguarded(session, reason="to have it gone"), session.no_autoflush:
            session.execute(sa.delete(Payment.__table__))
        with pytest.raises(StaleDataError):
            session.flush()
        session.rollback()
        filled.do(sa.delete(Payment.__table__))
        assert session.execute(sa.update(Payment).where(Payment.id == 1).values(state="x")).rowcount == 0
        session.commit()


def test_a_lease_that_is_about_something_else_altogether_is_refused(filled: Place) -> None:
    with under(filled, "nightly report") as session:
        session.get(Payment, 1).state = "x"
        refused(session, session.flush, flushed=True)


def test_a_row_is_not_moved_to_another_customer(filled: Place) -> None:
    table = Payment.__table__
    with under(filled, "customer:7") as session:
        session.get(Payment, 1).customer_id = 8
        refused(session, session.flush, flushed=True)
        move = table.update().where(table.c.customer_id == 7)
        refused(session, lambda: session.execute(move.values(customer_id=8)))
        refused(session, lambda: session.execute(move, {"customer_id": 8}))
        with pytest.raises(UnverifiableWrite):
            session.execute(move.values(customer_id=table.c.customer_id + 1))
        session.rollback()
        with pytest.raises(UnverifiableWrite):
            session.execute(sa.update(Payment).where(Payment.customer_id == 7).values(customer_id=Payment.id))
        session.rollback()
        rows = [{"id": 1, "customer_id": 8}]
        refused(session, lambda: session.execute(sa.update(Payment), rows))
    assert filled.do(sa.select(table.c.customer_id).order_by(table.c.id)) == [(7,), (7,), (8,), (8,)]


def test_a_row_is_not_taken_from_another_customer(filled: Place) -> None:
    table = Payment.__table__
    with under(filled, "customer:7") as session:
        session.get(Payment, 3).customer_id = 7
        refused(session, session.flush, flushed=True)
        take = table.update().where(table.c.id == 3).values(customer_id=7)
        refused(session, lambda: session.execute(take))
        take = table.update().where(table.c.customer_id == 8).values(customer_id=7)
        refused(session, lambda: session.execute(take))
    assert filled.do(sa.select(table.c.customer_id).order_by(table.c.id)) == [(7,), (7,), (8,), (8,)]


def test_a_lease_on_both_moves_a_row(filled: Place) -> None:
    with under(filled, "customer:7", "customer:8") as session:
        session.get(Payment, 1).customer_id = 8
        session.commit()
    table = Payment.__table__
    assert filled.do(sa.select(table.c.customer_id).order_by(table.c.id)) == [(8,), (7,), (8,), (8,)]


def test_the_key_of_a_row_is_not_changed_to_another_resource(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        session.get(Ticket, 1).id = 9
        refused(session, session.flush, flushed=True)
        refused(session, lambda: session.execute(sa.update(Ticket).where(Ticket.id == 1).values(id=9)))
    assert filled.do(sa.select(Ticket.__table__.c.id)) == [(1,), (2,)]


# Columns of other kinds


def test_a_resource_of_a_uuid(filled: Place) -> None:
    with under(filled, f"document:{FIRST}") as session:
        session.get(Document, FIRST).state = "read"
        session.get(Page, 1).state = "read"
        session.commit()
        session.execute(sa.update(Document).where(Document.id == FIRST).values(state="by criteria"))
        session.commit()
        session.get(Document, SECOND).state = "x"
        refused(session, session.flush, flushed=True)
        session.get(Page, 2).state = "x"
        refused(session, session.flush, flushed=True)
    assert states(filled, Document) == ["by criteria", "open"]
    assert states(filled, Page) == ["read", "open"]


def test_a_resource_of_two_columns_one_of_them_text(filled: Place) -> None:
    with under(filled, "shelf:1/a") as session:
        session.get(Shelf, (1, "a")).state = "full"
        session.commit()
        session.get(Shelf, (1, "b")).state = "x"
        refused(session, session.flush, flushed=True)
        refused(session, lambda: session.execute(sa.update(Shelf).where(Shelf.house == 1).values(state="x")))
        session.execute(sa.update(Shelf).where(Shelf.house == 1, Shelf.label == "a").values(state="fuller"))
        session.add(Shelf(house=2, label="a", state="x"))
        refused(session, session.flush, flushed=True)
    assert states(filled, Shelf) == ["full", "open"]


def test_a_resource_of_a_copied_and_of_a_declared_table(place: Place) -> None:
    metadata = MetaData()
    copy = job_table(MetaData(), *fence_columns(resource="job:{id}")).to_metadata(metadata)
    place.make(metadata)
    reflected = fence(Table("job", MetaData(), autoload_with=place.outside), resource="job:{id}")
    for table in (copy, reflected):
        with under(place, "job:1") as session:
            session.execute(table.insert().values(id=1, state="new"))
            refused(session, lambda table=table: session.execute(table.insert().values(id=2, state="new")))


# Rows that follow others


def join(session: Session, ticket_id: int, tag_id: int) -> None:
    ticket, tag = session.get(Ticket, ticket_id), session.get(Tag, tag_id)
    ticket.tags.append(tag)
    session.info["kept"] = ticket


def part(session: Session, ticket_id: int) -> None:
    ticket = session.info["kept"] = session.get(Ticket, ticket_id)
    ticket.tags.clear()


def test_a_subclass_s_row_belongs_to_what_its_base_row_does(filled: Place) -> None:
    with under(filled, "work:1") as session:
        session.get(Print, 1).state = "printed"
        session.commit()
        session.get(Print, 2).state = "x"
        refused(session, session.flush, flushed=True)
        session.delete(session.get(Print, 2))
        refused(session, session.flush, flushed=True)
        session.add(Print(id=3, state="x"))
        refused(session, session.flush, flushed=True)
    assert states(filled, Print) == ["printed", "open"]
    assert tokens(filled, Work) == [10, 0]


@pytest.mark.parametrize("resource", ["ticket:1", "tag:2"])
def test_a_lease_on_either_side_joins_two_rows(filled: Place, resource: str) -> None:
    with under(filled, resource) as session:
        join(session, 1, 2)
        session.commit()
    assert filled.do(sa.select(linked)) == [(1, 2)]
    claimed = {"ticket:1": ([10, 0], [0, 0]), "tag:2": ([0, 0], [0, 10])}
    assert (tokens(filled, Ticket), tokens(filled, Tag)) == claimed[resource], "only what the lease is about"
    with under(filled, resource, token=11) as session:
        part(session, 1)
        session.commit()
    assert filled.do(sa.select(linked)) == []


def test_a_lease_on_neither_side_joins_nothing(filled: Place) -> None:
    with under(filled, "ticket:2") as session:
        join(session, 1, 1)
        refused(session, session.flush, flushed=True)
        filled.do(linked.insert().values(ticket_id=1, tag_id=1))
        part(session, 1)
        refused(session, session.flush, flushed=True)
        refused(session, lambda: session.execute(linked.delete().where(linked.c.tag_id == 1)))
    assert filled.do(sa.select(linked)) == [(1, 1)]


def test_a_lease_on_one_row_does_not_join_others_in_the_same_batch(filled: Place) -> None:
    with under(filled, "ticket:1") as session:
        rows = [{"ticket_id": 1, "tag_id": 1}, {"ticket_id": 2, "tag_id": 1}]
        refused(session, lambda: session.execute(linked.insert(), rows))
    assert filled.do(sa.select(linked)) == []


def test_a_batch_whose_rows_each_have_a_side_of_the_lease_is_admitted(filled: Place) -> None:
    with under(filled, "ticket:1", "tag:2") as session:
        session.execute(linked.insert(), [{"ticket_id": 1, "tag_id": 1}, {"ticket_id": 2, "tag_id": 2}])
        session.commit()
    assert filled.do(sa.select(linked).order_by(*linked.c)) == [(1, 1), (2, 2)]


def test_a_stale_side_joins_nothing(filled: Place) -> None:
    filled.do(sa.update(Ticket.__table__).values(fence_token=20, fence_holder=uuid.uuid4()))
    with under(filled, "ticket:1") as session:
        join(session, 1, 1)
        with pytest.raises(StaleToken):
            session.flush()
    assert filled.do(sa.select(linked)) == []


def test_rows_are_not_joined_without_a_guard(filled: Place) -> None:
    with Session(filled.engine) as session:
        join(session, 1, 1)
        with pytest.raises(UnguardedWrite):
            session.flush()
    assert filled.do(sa.select(linked)) == []


def test_everything_is_configured() -> None:
    configure_mappers()
