"""INSERT and its upserts, guarded: new rows are stamped, rows that are there are compared first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql.dml import OnDuplicateClause
from sqlalchemy.dialects.postgresql import dml as postgresql
from sqlalchemy.dialects.sqlite import dml as sqlite
from sqlalchemy.sql.selectable import Select

from fencing.errors import UnverifiableWrite
from fencing.sql.fence import Fence
from fencing.sql.guard import Verb, admitted, refuse_replacing, stamps

DO_NOTHING = (postgresql.OnConflictDoNothing, sqlite.OnConflictDoNothing)
DO_UPDATE = (postgresql.OnConflictDoUpdate, sqlite.OnConflictDoUpdate)


def guarded_insert(statement: Any, fence: Fence) -> tuple[Verb, Any]:
    """The insert with its rows stamped, and what it is. UnverifiableWrite if it cannot be guarded."""
    refuse_replacing(statement, fence.name)
    conflict = statement._post_values_clause
    verb: Verb = "insert"
    if upserts(statement):
        verb = "upsert"
        statement = statement._generate()
        statement._post_values_clause = _guarded_conflict(statement, conflict, fence)
    return verb, _stamped(statement, fence)


def upserts(statement: Any) -> bool:
    """Whether an INSERT may change a row that is there."""
    conflict = statement._post_values_clause
    return conflict is not None and not isinstance(conflict, DO_NOTHING)


def changes_of(conflict: Any) -> Mapping[Any, Any]:
    """What an upsert sets in a row that is there."""
    return dict(conflict.update_values_to_set) if isinstance(conflict, DO_UPDATE) else conflict.update


def _guarded_conflict(statement: Any, conflict: Any, fence: Fence) -> Any:
    if statement.select is not None:
        raise UnverifiableWrite(
            f"an upsert from a SELECT into {fence.name!r} cannot be verified: nobody knows which rows it meets. "
            "Select first, then upsert values",
            table=fence.name,
        )
    clause = conflict._clone()
    if isinstance(conflict, DO_UPDATE):
        return _guarded_do_update(clause, fence, statement.excluded)
    if isinstance(conflict, OnDuplicateClause):
        return _guarded_on_duplicate(clause, fence)
    raise UnverifiableWrite(
        f"{type(conflict).__name__} on {fence.name!r} is not known to the guard", table=fence.name
    )


def _guarded_do_update(clause: Any, fence: Fence, new: Any) -> Any:
    values = dict(clause.update_values_to_set)  # a list of pairs in SQLAlchemy 2.0
    for column in (fence.token, fence.holder):
        for name in (column.key, column.name, column):
            values.pop(name, None)
    values.update({column.key: new[column.key] for column in (fence.token, fence.holder)})
    listed = isinstance(clause.update_values_to_set, list)
    clause.update_values_to_set = list(values.items()) if listed else values
    rule = admitted(fence, new=new)
    where = clause.update_whereclause
    clause.update_whereclause = rule if where is None else sa.and_(where, rule)
    return clause


def _guarded_on_duplicate(clause: Any, fence: Fence) -> Any:
    """MySQL has no WHERE there, so that each assignment is conditional, from left to right.

    The fence is that of the row sent, not a parameter: PyMySQL takes none in this clause when it sends a batch.

    Safe because the fence is assigned last, and the holder before the token: an assignment sees those before
    it. With the new holder the rule says of the old token what it said with the old one, if it was admitted;
    and if it was not, the holder is the old one still.
    """
    columns = {column.key: column for column in fence.table.c}
    given = {getattr(key, "key", key): value for key, value in clause.update.items()}
    order = [getattr(key, "key", key) for key in clause._parameter_ordering or ()]
    order += [key for key in columns if key in given and key not in order]
    new = clause.inserted_alias.c
    stamp = {key: new[key] for key in (fence.holder.key, fence.token.key)}
    values = {**{key: given[key] for key in order if key not in stamp}, **stamp}
    rule = admitted(fence, new=new)
    clause.update = {
        key: sa.case((rule, _typed(value, columns[key])), else_=columns[key]) for key, value in values.items()
    }
    clause._parameter_ordering = list(values)
    return clause


def _typed(value: Any, column: sa.Column[Any]) -> Any:
    """A value with the type of the column that it goes to, which it has not inside an expression."""
    if isinstance(value, sa.BindParameter) and value.type._isnull:
        return value._with_binary_element_type(column.type)
    return value


def _stamped(statement: Any, fence: Fence) -> Any:
    values = stamps(fence)
    if statement.select is not None:
        return _stamped_select(statement, fence, values)
    if statement._multi_values:
        keys = {column.key for column in values} | {column.name for column in values}
        statement = statement._generate()
        statement._multi_values = tuple(
            [
                {
                    **{key: value for key, value in row.items() if getattr(key, "key", key) not in keys},
                    **values,
                }
                for row in rows
            ]
            for rows in statement._multi_values
        )
        return statement
    given = statement._values or {}
    names = {column.key for column in values} | {column.name for column in values}
    if any(getattr(key, "key", key) in names for key in given):
        statement = statement._generate()
        statement._values = type(given)({k: v for k, v in given.items() if getattr(k, "key", k) not in names})
    return statement.values(values)


def _stamped_select(statement: Any, fence: Fence, values: dict[sa.Column[Any], Any]) -> Any:
    names = [getattr(name, "key", name) for name in statement._select_names]
    if any(column.key in names or column.name in names for column in values):
        raise UnverifiableWrite(
            f"INSERT ... SELECT sets the fence columns of {fence.name!r} itself: leave them to the guard",
            table=fence.name,
        )
    source = statement.select
    labelled = [bind.label(column.key) for column, bind in values.items()]
    if isinstance(source, Select) and not source._distinct and not source._group_by_clauses:
        source = source.add_columns(*labelled)
    else:
        inner = source.subquery()
        source = sa.select(*inner.c, *labelled)
    return statement.from_select(
        [*names, *(column.key for column in values)],
        source,
        include_defaults=statement.include_insert_from_select_defaults,
    )
