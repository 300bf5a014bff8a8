"""Guarded repository methods: one statement each where one is enough, and a word for what became of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy import inspect
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.orm.exc import StaleDataError

from fencing.errors import ConfigurationError, RowMissing
from fencing.sql.binding import Holding
from fencing.sql.claims import claim
from fencing.sql.fence import Fence, fence_of
from fencing.sql.session import guard_of, guarded
from fencing.sql.verdict import among
from fencing.token import Grant

M = TypeVar("M")

Outcome = Literal["claimed", "updated", "deleted", "written", "missing"]


class Written(NamedTuple):
    """What became of one row, by its primary key (after an upsert by another key: by that key).

    ``written``: inserted or updated, the database does not say which.
    """

    identity: tuple[object, ...]
    outcome: Outcome


class GuardedRepository(Generic[M]):
    """Reads and writes of one model under a lease. Subclass it and add your own methods.

    Rows are named by their primary key: a value, or a tuple for a composite one. Without `lease` the session must
    be guarded already. The session is yours: you commit it, and what you change on its objects by yourself is
    guarded until that commit, no longer. Every method may raise what a guarded write raises (`StaleToken`,
    `WrongResource`, `LeaseLost`); those for one row raise `RowMissing` when it is not there, those for
    many say so in their answer.

    Example::

        invoices = GuardedRepository(Invoice, session, lease)
        invoices.update(42, state="paid")  # one guarded statement, no read first
        session.commit()
    """

    def __init__(self, model: type[M], session: Session, lease: Holding | Grant | None = None) -> None:
        self.model = model
        self.session = session
        self.lease = lease
        self._mapper: Mapper[M] = inspect(model)
        self._fence = _fence(self._mapper)

    def guarding(self) -> AbstractContextManager[Session]:
        """The session, guarded: for methods of your own.

        Example::

            class Invoices(GuardedRepository[Invoice]):
                def close_all(self, customer: int) -> None:
                    with self.guarding() as session:
                        session.execute(update(Invoice).where(Invoice.customer == customer).values(state="closed"))
        """
        return nullcontext(self.session) if self.lease is None else guarded(self.session, self.lease)

    def get(self, identity: object) -> M | None:
        """The row, read while the lease is held, or None."""
        with self.guarding() as session:
            return session.get(self.model, identity)

    def add(self, entity: M) -> M:
        """Insert a new row; the same object, with what the database filled in."""
        return self.add_many([entity])[0]

    def add_many(self, entities: Iterable[M]) -> list[M]:
        """Insert new rows, in one batch where the database can."""
        rows = list(entities)
        with self.guarding() as session:
            session.add_all(rows)
            session.flush()
        return rows

    def save(self, entity: M) -> M:
        """Write the present state of an object, whether it is new, loaded or detached.

        Returns the object that belongs to this session, which for a detached one is another.
        """
        return self.save_many([entity])[0]

    def save_many(self, entities: Iterable[M]) -> list[M]:
        """Write the present state of objects, in one flush."""
        with self.guarding() as session:
            rows = [entity if entity in session else session.merge(entity) for entity in entities]
            session.flush()
        return rows

    def claim(self, identity: object) -> Written:
        """Raise the row's fence to this lease, and nothing else: from here on older holders are refused."""
        return self._one(self.claim_many([identity]))

    def claim_many(self, identities: Iterable[object]) -> list[Written]:
        """Raise the fence of several rows."""
        keys = [self._key(identity) for identity in identities]
        with self.guarding() as session:
            columns = tuple(self._fence.table.primary_key.columns)
            counted = claim(self._connection(session), self._fence, columns, keys)
            return self._told(session, keys, "claimed", known=counted == len(keys))

    def update(self, identity: object, **values: Any) -> Written:
        """Set attributes of one row, without reading it first. Values may be SQL expressions."""
        key = self._key(identity)
        if not values:
            raise ConfigurationError("update() sets something; to raise the row's fence alone, claim() it")
        self._known(values)
        with self.guarding() as session:
            if len(self._mapper.tables) > 1:
                return self._one(self._bulk(session, [self._row(key, values)], [key]))
            same = (column == value for column, value in zip(self._mapper.primary_key, key, strict=True))
            result: Any = session.execute(sa.update(self.model).where(*same).values(values))
            return self._one([Written(key, "updated" if result.rowcount else "missing")])

    def update_many(self, rows: Iterable[Mapping[str, Any]]) -> list[Written]:
        """Set attributes of several rows; each mapping names its primary key too. Values are plain."""
        given = [dict(row) for row in rows]
        keys = [self._key_in(row) for row in given]
        for row in given:
            if not self._besides_key(row):
                raise ConfigurationError(
                    "each row sets something besides its key; claim_many() raises fences alone"
                )
        if not given:
            return []
        with self.guarding() as session:
            return self._bulk(session, given, keys)

    def _bulk(
        self, session: Session, given: list[dict[str, Any]], keys: list[tuple[Any, ...]]
    ) -> list[Written]:
        """The ORM's update by primary key, and what became of each row."""
        try:
            session.execute(sa.update(self.model), given)
        except StaleDataError:  # the ORM's word for a row that is not there
            there = self._there(session, keys)
            found = [row for row, key in zip(given, keys, strict=True) if key in there]
            if found:
                session.execute(sa.update(self.model), found)
            return [Written(key, "updated" if key in there else "missing") for key in keys]
        counted = len(keys) == 1 or self._connection(session).dialect.supports_sane_multi_rowcount
        return self._told(session, keys, "updated", known=counted)

    def upsert(self, values: Mapping[str, Any], *, key: Sequence[str] | None = None) -> Written:
        """Insert a row, or update the one that has the same key (the primary key, when none is named)."""
        return self.upsert_many([values], key=key)[0]

    def upsert_many(
        self, rows: Iterable[Mapping[str, Any]], *, key: Sequence[str] | None = None
    ) -> list[Written]:
        """Insert rows, or update those that are there, in one statement."""
        given = [dict(row) for row in rows]
        if not given:
            return []
        names = list(self._key_names if key is None else key)
        if any(set(row) != set(given[0]) for row in given):
            raise ConfigurationError("rows that are upserted together give the same columns each")
        for row in given:
            self._besides_key(row)
        if missing := [name for name in names if name not in given[0]]:
            raise ConfigurationError(f"an upsert gives its key: {', '.join(missing)} is missing")
        with self.guarding() as session:
            statement = self._upsert(self._connection(session).dialect.name, given[0], names)
            session.execute(statement, given)
            for row in given:
                self._expire(session, row)
        return [Written(tuple(row[name] for name in names), "written") for row in given]

    def delete(self, identity: object) -> Written:
        """Delete one row: by one statement, or through the session when the ORM has more to do for it."""
        return self._one(self.delete_many([identity]))

    def delete_many(self, identities: Iterable[object]) -> list[Written]:
        """Delete several rows."""
        keys = [self._key(identity) for identity in identities]
        if not keys:
            return []
        with self.guarding() as session:
            if self._cascades:
                return [self._delete_loaded(session, key) for key in keys]
            if len(keys) > 1 and len(keys[0]) == 1:
                there = self._there(session, keys)
                [column] = self._mapper.primary_key
                session.execute(sa.delete(self.model).where(column.in_([value for (value,) in there])))
                return [Written(key, "deleted" if key in there else "missing") for key in keys]
            return [self._delete_one(session, key) for key in keys]

    # Keys

    @property
    def _key_names(self) -> list[str]:
        return [self._mapper.get_property_by_column(column).key for column in self._mapper.primary_key]

    def _key(self, identity: object) -> tuple[Any, ...]:
        key = tuple(identity) if isinstance(identity, tuple | list) else (identity,)
        if len(key) != len(self._mapper.primary_key) or any(
            value is None or isinstance(value, self.model) for value in key
        ):
            raise ConfigurationError(
                f"{self.model.__name__} has a key of {len(self._mapper.primary_key)} values "
                f"({', '.join(self._key_names)}), not {identity!r}"
            )
        return key

    def _row(self, key: tuple[Any, ...], values: Mapping[str, Any]) -> dict[str, Any]:
        self._known(values, plain=True)
        return {**values, **dict(zip(self._key_names, key, strict=True))}

    def _besides_key(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What a row gives besides its key, checked."""
        values = {name: value for name, value in row.items() if name not in self._key_names}
        self._known(values, plain=True)
        return values

    def _known(self, values: Mapping[str, Any], *, plain: bool = False) -> None:
        """Refuse what SQLAlchemy would leave out without a word."""
        for name, value in values.items():
            if name in self._key_names:
                raise ConfigurationError(
                    f"{name!r} is the primary key of {self.model.__name__}: it is not set"
                )
            if name not in self._mapper.column_attrs:
                raise ConfigurationError(f"{self.model.__name__} has no column attribute {name!r}")
            if plain and isinstance(value, sa.ClauseElement):
                raise ConfigurationError(
                    f"{name!r} is a SQL expression, which a batch cannot take: update rows one by one, or write the "
                    "statement yourself inside guarding()"
                )

    def _key_in(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            return tuple(row[name] for name in self._key_names)
        except KeyError as missing:
            raise ConfigurationError(
                f"each row names its primary key: {missing} of {self.model.__name__} is missing"
            ) from None

    def _there(self, session: Session, keys: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        """Those of the keys that have a row."""
        table = self._fence.table
        columns = tuple(table.primary_key.columns)
        connection = self._connection(session)
        return {
            tuple(row)
            for row in connection.execute(sa.select(*columns).where(among(connection, columns, keys)))
        }

    # Outcomes

    def _one(self, told: list[Written]) -> Written:
        [written] = told
        if written.outcome == "missing":
            guard = guard_of(self.session, self.lease)
            shown = written.identity[0] if len(written.identity) == 1 else written.identity
            raise RowMissing(
                f"there is no {self._fence.name} {shown!r}",
                resource=guard.resource,
                token=guard.token,
                holder=guard.holder,
                table=self._fence.name,
                identity=written.identity,
            )
        return written

    def _told(
        self, session: Session, keys: list[tuple[Any, ...]], outcome: Outcome, *, known: bool
    ) -> list[Written]:
        there = set(keys) if known else self._there(session, keys)
        return [Written(key, outcome if key in there else "missing") for key in keys]

    def _connection(self, session: Session) -> sa.Connection:
        return session.connection(bind_arguments={"mapper": self._mapper})

    # What the ORM does besides

    @property
    def _cascades(self) -> bool:
        family = list(self._mapper.self_and_descendants)
        return any(len(mapper.tables) > 1 for mapper in family) or any(
            not relation.viewonly
            and relation.direction is not RelationshipDirection.MANYTOONE
            and not relation.passive_deletes
            for mapper in family
            for relation in mapper.relationships
        )

    def _delete_one(self, session: Session, key: tuple[Any, ...]) -> Written:
        same = (column == value for column, value in zip(self._mapper.primary_key, key, strict=True))
        result: Any = session.execute(sa.delete(self.model).where(*same))
        return Written(key, "deleted" if result.rowcount else "missing")

    def _delete_loaded(self, session: Session, key: tuple[Any, ...]) -> Written:
        entity = session.get(self.model, key)
        if entity is None:
            return Written(key, "missing")
        session.delete(entity)
        session.flush()
        return Written(key, "deleted")

    def _upsert(self, dialect: str, row: Mapping[str, Any], key: list[str]) -> Any:
        columns = {name: self._mapper.columns[name] for name in row}
        changed = {name: column for name, column in columns.items() if name not in key}
        token = self._fence.token
        if dialect in ("postgresql", "sqlite"):
            module: Any = postgresql if dialect == "postgresql" else sqlite
            statement = module.insert(self.model)
            taken = {column.key: statement.excluded[column.key] for column in changed.values()}
            return statement.on_conflict_do_update(
                index_elements=[columns[name] for name in key],
                set_=taken or {token.key: statement.excluded[token.key]},
            )
        if dialect in ("mysql", "mariadb"):
            into: Any = mysql.insert(self.model)
            taken = {column.key: into.inserted[column.key] for column in changed.values()}
            return into.on_duplicate_key_update(taken or {token.key: into.inserted[token.key]})
        raise ConfigurationError(f"upsert is not known for {dialect}")

    def _expire(self, session: Session, row: Mapping[str, Any]) -> None:
        if all(name in row for name in self._key_names):
            known = session.identity_map.get(self._mapper.identity_key_from_primary_key(self._key_in(row)))
            if known is not None:
                session.expire(known)


def _fence(mapper: Mapper[Any]) -> Fence:
    for each in mapper.iterate_to_root():
        table = each.local_table
        fence = fence_of(table) if isinstance(table, sa.Table) else None
        if fence is not None:
            return fence
    raise ConfigurationError(f"{mapper.class_.__name__} is not fenced: use the Fenced mixin or fence(table)")
