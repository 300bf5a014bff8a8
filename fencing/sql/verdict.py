"""What became of a guarded statement: admitted, or refused with the reason.

A driver's count of rows is proof when each set of parameters can touch one row at the most and as many were
touched. In every other case the database is asked: which of the rows that the statement is about does the
fence refuse? So the extra read is paid by batches whose driver cannot count them, by criteria that may match
any number of rows, and by failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection, Dialect
from sqlalchemy.dialects.postgresql import ARRAY

from fencing.errors import StaleToken, WrongResource
from fencing.sql.binding import Guard
from fencing.sql.conflicts import Keys, conflicting, sent_rows
from fencing.sql.fence import Fence
from fencing.sql.guard import HOLDER, TOKEN, Params, refused, unverifiable, value_in
from fencing.sql.plan import Plan

CHUNK = 500
"""Keys asked for at once."""
MOST = 10_000
"""Rows that a statement may be about when they have to be looked at before it is sent."""


def proven(plan: Plan, sets: int, result: Any, dialect: Dialect) -> bool:
    """Whether the driver's count alone shows that every row was admitted, or there is nothing to show."""
    if plan.by_key:
        sane = dialect.supports_sane_rowcount if sets == 1 else dialect.supports_sane_multi_rowcount
        return sane and result.rowcount == sets
    return plan.verb == "insert" or plan.settled


def settled(asker: Asker, plan: Plan, sets: Sequence[Params]) -> Any:
    """A statement whose WHERE looks at other rows of its table, tied to the rows that it matches now.

    Nobody could tell afterwards what it was about: the statement changes what its WHERE says. So the rows are
    looked at and locked first. Raises StaleToken when the fence refuses one of them.
    """
    fence = plan.fence
    if len(sets) != 1:
        unverifiable(fence, "it is a batch whose WHERE looks at other rows of the table. Do them one by one")
    params = {**sets[0], **bound(asker.guard, fence)}
    query = _matching(plan).add_columns(refused(fence, plan.target).label("refused")).limit(MOST + 1)
    found = asker.ask(query.with_for_update(of=_locked(asker, plan)), params).all()
    if len(found) > MOST:
        unverifiable(
            fence, f"its WHERE looks at other rows of the table, and matches more than {MOST}: do it in parts"
        )
    for *row, is_refused in found:
        if is_refused:
            raise stale(fence, asker.guard, row)
    columns = [plan.target.c[column.key] for column in fence.table.primary_key.columns]
    keys = list(dict.fromkeys(tuple(row[: len(columns)]) for row in found))
    statement = plan.statement.where(among(asker.connection, columns, keys))
    statement.__dict__["_fencing_plan"] = plan._replace(settled=True)
    return statement


def _locked(asker: Asker, plan: Plan) -> Any:
    """Whose rows are locked; MariaDB locks those of every table that is read."""
    if asker.connection.dialect.name != "postgresql":
        return None
    return plan.target if plan.entity is None else plan.entity.entity


class Asker(NamedTuple):
    """Who asks the database what became of a statement."""

    connection: Connection
    guard: Guard
    options: Mapping[str, Any]
    """The execution options of the statement: it may translate schemas."""

    def ask(self, query: Any, params: Any = None) -> Any:
        schemas = self.options.get("schema_translate_map")
        options = {"schema_translate_map": schemas} if schemas else {}
        return self.connection.execute(query, params, execution_options=options)

    def first(self, query: Any, params: Params) -> Any:
        """The first row. On MySQL and MariaDB a plain read looks at an old snapshot, and would not see it."""
        query = query.limit(1)
        if self.connection.dialect.name in ("mysql", "mariadb"):
            query = query.with_for_update(read=True)
        return self.ask(query, params).first()


def judge(asker: Asker, plan: Plan, sets: Sequence[Params], result: Any) -> None:
    """Raise StaleToken when the fence refused a row of a statement that is not proven to be admitted."""
    if plan.verb == "upsert":
        dialect = asker.connection.dialect
        # MySQL counts an update twice; what is returned in batches is not counted at all.
        counts = not plan.statement._returning and dialect.name not in ("mysql", "mariadb")
        sane = len(sets) == 1 or dialect.supports_sane_multi_rowcount
        if counts and sane and result.rowcount == len(sent_rows(plan.statement, sets)):
            return
    found = refused_row(asker, plan, sets)
    if found is not None:
        raise stale(plan.fence, asker.guard, found)


def refused_row(asker: Asker, plan: Plan, sets: Sequence[Params]) -> Any:
    """A row that the statement is about and that the fence refuses, or None."""
    if plan.verb == "insert":
        return None
    if plan.verb == "upsert":
        return _first(
            asker, plan.fence, conflicting(plan.fence, plan.statement, sent_rows(plan.statement, sets))
        )
    if plan.by_key:
        return _first(asker, plan.fence, keyed(plan, sets))
    query = _matching(plan).where(refused(plan.fence, plan.target))
    for each in sets:
        row = asker.first(query, {**each, **bound(asker.guard, plan.fence)})
        if row is not None:
            return row
    return None


def bound(guard: Guard, fence: Fence) -> dict[str, object]:
    """The parameters that every guarded statement has."""
    return {TOKEN: guard.token, HOLDER: guard.holder(fence)}


def stored(fence: Fence, target: Any = None) -> list[sa.ColumnElement[Any]]:
    """What is read of a row that was refused: its key, then its fence."""
    columns = (fence.table if target is None else target).c
    keys = [columns[column.key] for column in fence.table.primary_key.columns]
    return [*keys, columns[fence.token.key].label("token"), columns[fence.holder.key].label("holder")]


def _matching(plan: Plan) -> sa.Select[Any]:
    """The rows that the statement is about, as its WHERE says, with what the ORM adds to it."""
    fence = plan.fence
    if plan.entity is None:
        return sa.select(*stored(fence, plan.target)).select_from(plan.target).where(*plan.criteria)
    mapper, entity, options = plan.entity
    parts = [*fence.table.primary_key.columns, fence.token, fence.holder]
    if not all(
        mapper.columns.contains_column(column) for column in parts[-2:]
    ):  # the model leaves its fence out
        parts = stored(fence, plan.target)
        return sa.select(*parts).select_from(entity).where(*plan.criteria).options(*options)
    attributes = [getattr(entity, mapper.get_property_by_column(column).key) for column in parts]
    return sa.select(*attributes).where(*plan.criteria).options(*options)


def keyed(
    plan: Plan, sets: Sequence[Params]
) -> Iterator[tuple[tuple[sa.Column[Any], ...], list[tuple[Any, ...]]]]:
    """The primary keys of the rows that the sets of parameters are about."""
    columns = tuple(plan.fence.table.primary_key.columns)
    binds = [plan.pins[column.key] for column in columns]
    yield columns, list(dict.fromkeys(tuple(value_in(bind, each) for bind in binds) for each in sets))


def _first(asker: Asker, fence: Fence, keys: Keys) -> Any:
    """A row with one of the keys that the fence refuses, or None."""
    for columns, values in keys:
        for at in range(0, len(values), CHUNK):
            some = among(asker.connection, columns, values[at : at + CHUNK])
            query = sa.select(*stored(fence)).where(some, refused(fence))
            row = asker.first(query, bound(asker.guard, fence))
            if row is not None:
                return row
    return None


def among(
    connection: Connection, columns: Sequence[sa.Column[Any]], values: list[tuple[Any, ...]]
) -> sa.ColumnElement[bool]:
    """Whether a row has one of these keys."""
    if len(columns) == 1:
        column, plain = columns[0], [value for (value,) in values]
        nested = isinstance(column.type, sa.ARRAY)
        if connection.dialect.name == "postgresql" and not nested:  # one parameter, whatever their number
            return column == sa.any_(sa.bindparam(None, plain, type_=ARRAY(column.type), unique=True))
        return column.in_(plain)
    return sa.tuple_(*columns).in_(values)


def stale(fence: Fence, guard: Guard, row: Any, *, note: str = "") -> StaleToken:
    """The error that says whose row it is now."""
    grant = guard.grant
    *key, token, holder = row
    identity = tuple(key)
    holder = holder.hex if isinstance(holder, UUID) else holder.replace("-", "") if holder else None
    same = token == grant.token
    newest = "the same token, of another holder" if same else f"token {token}"
    return StaleToken(
        f"{fence.name} {_shown(identity)} was not written with token {grant.token}: it has been written with "
        f"{newest} ({holder}). Somebody else holds {grant.resource!r} of {grant.namespace!r} now, or held it since "
        "(peek() tells): drop this work" + note,
        resource=grant.resource,
        token=grant.token,
        holder=grant.holder,
        stored_token=token,
        stored_holder=holder,
        table=fence.name,
        identity=identity,
    )


def wrong_resource(
    fence: Fence, guard: Guard, what: str, identity: tuple[object, ...] | None = None
) -> WrongResource:
    grant = guard.grant
    return WrongResource(
        f"the lease is about {', '.join(map(repr, grant.resources))}, and {what}",
        resource=grant.resource,
        token=grant.token,
        holder=grant.holder,
        table=fence.name,
        identity=identity,
    )


def _shown(identity: tuple[object, ...]) -> str:
    return repr(identity[0]) if len(identity) == 1 else repr(identity)
