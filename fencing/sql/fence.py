"""How a table says that it is fenced: two columns that remember the newest token admitted, and for whom.

``fence_token`` and ``fence_holder`` are NOT NULL with defaults below every token, so that code which knows
nothing of the fence keeps inserting. They are found by a mark in the columns' `info`, which travels with
copies of a table and is not rendered by Alembic. They are never indexed: that would cost HOT updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import Mapped, MappedColumn, Mapper, declared_attr, mapped_column

from fencing.errors import ConfigurationError
from fencing.sql.resource import Template

NO_HOLDER = UUID(int=0)
TOKEN, HOLDER = "fence_token", "fence_holder"
_MARK = "fencing"
C = TypeVar("C")


class Mark(NamedTuple):
    """What a fence column's `info` says: which of the two it is, and what the rows are tied to."""

    part: str
    resource: str | None = None
    owner: type | None = None


class Fence(NamedTuple):
    """The fence of one table."""

    table: sa.Table
    token: sa.Column[Any]
    holder: sa.Column[Any]
    resource: Template | None
    name: str
    """The table's name, with its schema."""
    dashed: bool
    """Whether holders are UUIDs here, and not plain text."""
    keys: tuple[str, str]
    """By which statements and their parameters name the two columns."""

    @property
    def holder_type(self) -> Any:
        """The type that holders are sent as: text, which drivers send with less ado than UUID objects."""
        kind = self.holder.type
        return sa.Uuid(as_uuid=False, native_uuid=kind.native_uuid) if isinstance(kind, sa.Uuid) else kind


def fence_columns(
    *, token: str = TOKEN, holder: str = HOLDER, resource: str | None = None
) -> tuple[sa.Column[int], sa.Column[UUID]]:
    """The two columns of a fence, for a table that is not made by the `Fenced` mixin.

    Example::

        invoice = Table("invoice", metadata, Column("id", Integer, primary_key=True), *fence_columns())
    """
    ours = _token_column(token, Mark("token", resource))
    event.listen(ours, "after_parent_attach", _attached, propagate=True)
    return ours, _holder_column(holder, Mark("holder"))


def fence(
    table: sa.Table, *, resource: str | None = None, token: str = TOKEN, holder: str = HOLDER
) -> sa.Table:
    """The same table, declared fenced: for one that has the columns already, such as a reflected one.

    Raises `ConfigurationError` when it lacks one of them, or the resource names a column that it has not.

    Example::

        invoice = fence(Table("invoice", metadata, autoload_with=engine), resource="invoice:{id}")
    """
    for name in (token, holder):
        if name not in table.c:
            raise ConfigurationError(
                f"table {table.fullname!r} has no column {name!r}: add the fence columns by a migration first"
            )
    table.c[token].info[_MARK] = Mark("token", resource)
    table.c[holder].info[_MARK] = Mark("holder")
    for kept in (_HERE, "_fencing_binds", "_fencing_claims"):
        table.__dict__.pop(kept, None)
    fence_of(table)
    DECLARED.append(str(table.fullname))
    return table


def _token_column(name: str, mark: Mark) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"), info={_MARK: mark})


def _holder_column(name: str, mark: Mark) -> sa.Column[UUID]:
    # A typed literal, so that each dialect spells the default as it stores holders.
    default = sa.literal(NO_HOLDER, sa.Uuid())
    return sa.Column(name, sa.Uuid(), nullable=False, server_default=default, info={_MARK: mark})


class Fenced:
    """A mixin for declarative models: every write to their rows is guarded.

    `__fence_resource__` ties each row to a resource: a lease on another one is refused with `WrongResource`.
    `__fence_columns__` names the columns otherwise. Both columns are deferred: reading rows costs nothing
    more, and ``undefer`` brings them.

    In joined-table inheritance the fence is on the base table and covers the tables of its subclasses.

    Example::

        class Invoice(Fenced, Base):
            __tablename__ = "invoice"
            __fence_resource__ = "invoice:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)
    """

    __fence_resource__: str | None = None
    __fence_columns__: tuple[str, str] = (TOKEN, HOLDER)

    if TYPE_CHECKING:
        fence_token: Mapped[int]
        """The highest token that wrote this row, as it was when it was loaded."""
        fence_holder: Mapped[UUID]
        """Whose token that was."""
    else:
        # Not annotated: a dataclass-mapped model would take them for fields of its own.

        @declared_attr
        def fence_token(cls):
            mark = Mark("token", cls.__fence_resource__, cls)
            return _deferred(cls, _token_column(cls.__fence_columns__[0], mark))

        @declared_attr
        def fence_holder(cls):
            return _deferred(cls, _holder_column(cls.__fence_columns__[1], Mark("holder")))

    def __init_subclass__(cls, **options: Any) -> None:
        if _concrete(cls):
            # A table of its own, to which SQLAlchemy hands down no column.
            for name in ("fence_token", "fence_holder"):
                if name not in cls.__dict__:
                    setattr(cls, name, Fenced.__dict__[name].fget(cls))
        super().__init_subclass__(**options)


def _concrete(cls: type) -> bool:
    arguments = cls.__dict__.get("__mapper_args__")
    if isinstance(arguments, declared_attr):
        arguments = arguments.fget(cls)
    return isinstance(arguments, dict) and bool(arguments.get("concrete"))


def _deferred(cls: type, column: sa.Column[C]) -> MappedColumn[C]:
    mapped: MappedColumn[C] = mapped_column(
        column.name,
        column.type,
        nullable=False,
        server_default=column.server_default.arg,  # type: ignore[union-attr]
        info=column.info,
        # The union that an abstract concrete base reads from has the columns too, and SQLAlchemy does not put
        # a deferred one together with those.
        deferred=not issubclass(cls, AbstractConcreteBase),
    )
    event.listen(mapped.column, "after_parent_attach", _attached, propagate=True)
    return mapped


@event.listens_for(Fenced, "mapper_configured", propagate=True)
def _has_a_fence(mapper: Mapper[Any], cls: type) -> None:
    tables = [table for table in mapper.tables if isinstance(table, sa.Table)]
    if not any(fence_of(table) for table in tables):
        names = ", ".join(str(table.fullname) for table in tables)
        raise ConfigurationError(
            f"{cls.__name__} is Fenced, but {names or 'its table'} has no fence columns: "
            "put *fence_columns() into the table"
        )


FENCED_NAMES: dict[str, str] = {}
"""Names of fenced tables, in lower case and without schema, for SQL that is only text."""

DECLARED: list[str] = []
"""Tables that were declared fenced by hand, in order: what was known of them before is known no more."""

_HERE = "_fencing_fence"


def fence_of(table: sa.Table) -> Fence | None:
    """The table's fence, or None when it has none."""
    try:
        found: Fence | None = table.__dict__[_HERE]
    except KeyError:
        found = table.__dict__[_HERE] = _find(table)
        if found is not None:
            FENCED_NAMES[table.name.lower()] = found.name
    return found


def _find(table: sa.Table) -> Fence | None:
    parts: dict[str, sa.Column[Any]] = {}
    mark = None
    for column in table.c:
        said = column.info.get(_MARK)
        if isinstance(said, Mark):
            parts[said.part] = column
            mark = said if said.part == "token" else mark
    if not parts:
        return None
    if len(parts) < 2 or mark is None:
        raise ConfigurationError(f"table {table.fullname!r} has only one of the two fence columns")
    _refuse_replacing(table)
    template = None if mark.resource is None else Template.of(mark.resource, table, mark.owner)
    dashed = isinstance(parts["holder"].type, sa.Uuid)
    token, holder = parts["token"], parts["holder"]
    return Fence(table, token, holder, template, str(table.fullname), dashed, (token.key, holder.key))


def _refuse_replacing(table: sa.Table) -> None:
    """A constraint that replaces rows (SQLite) deletes them where nobody can compare."""
    said = [constraint.dialect_options["sqlite"].get("on_conflict") for constraint in table.constraints]
    for column in table.c:
        options = column.dialect_options["sqlite"]
        said += [options.get(f"on_conflict_{kind}") for kind in ("primary_key", "not_null", "unique")]
    if any(str(each).upper() == "REPLACE" for each in said):
        raise ConfigurationError(
            f"table {table.fullname!r} has a constraint with ON CONFLICT REPLACE, which deletes rows unseen: "
            "a fenced table must do without"
        )


def _attached(column: sa.Column[Any], table: sa.Table) -> None:
    table.__dict__.pop(_HERE, None)
    FENCED_NAMES[table.name.lower()] = str(table.fullname)
