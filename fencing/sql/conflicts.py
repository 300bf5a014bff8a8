"""Upserts: the rows that one sends, and by which keys it can meet rows that are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from fencing.sql.fence import Fence
from fencing.sql.guard import Params, key_of, unverifiable, value_in, values_of
from fencing.sql.inserts import DO_UPDATE

Columns = tuple[sa.Column[Any], ...]
Keys = Iterable[tuple[Columns, list[tuple[Any, ...]]]]
"""Sets of columns, each with values for them."""


def sent_rows(statement: Any, sets: Sequence[Params]) -> list[Mapping[str, Any]]:
    """The rows that an upsert sends, by column key, as far as their values are plain."""
    if statement._multi_values:
        return [plain_values(row, {}) for rows in statement._multi_values for row in rows]
    fixed = values_of(statement)
    return [{**each, **plain_values(fixed, each)} for each in sets]


def plain_values(row: Mapping[Any, Any], params: Params) -> dict[str, Any]:
    """The values of a row that are no expressions, by column key."""
    values = {}
    for key, value in row.items():
        if isinstance(value, sa.BindParameter):
            if value.key in params or not value.required:
                values[key_of(key)] = value_in(value, params)
        elif not isinstance(value, sa.ClauseElement):
            values[key_of(key)] = value
    return values


def conflicting(fence: Fence, statement: Any, rows: list[Mapping[str, Any]]) -> Keys:
    """The unique keys by which the rows sent can have met rows that were there."""
    conflict = statement._post_values_clause
    if isinstance(conflict, DO_UPDATE):
        target = conflict_target(fence.table, conflict)
        if target is None or not all(column.key in row for column in target for row in rows):
            unverifiable(fence, "its conflict target is not made of columns whose values are known here")
        keys = [target]
    else:
        keys = unique_keys(fence.table)
        for column in {column for key in keys for column in key}:
            if any(column.key not in row for row in rows) and not _cannot_meet(column, statement):
                unverifiable(fence, f"the value of {column.key}, which is unique, is not known here: give it")
    for columns in keys:
        values = [tuple(row[column.key] for column in columns) for row in rows if _covers(row, columns)]
        yield columns, list(dict.fromkeys(values))


def _cannot_meet(column: sa.Column[Any], statement: Any) -> bool:
    """Whether a unique column that got no plain value meets no row: NULL, or numbered by the database."""
    named = {key_of(each) for each in values_of(statement)}
    filled = column.default is not None or (column.server_default is not None and not column.identity)
    return column.key not in named and not filled


def _covers(row: Mapping[str, Any], columns: Columns) -> bool:
    return all(column.key in row and row[column.key] is not None for column in columns)


def unique_keys(table: sa.Table) -> list[Columns]:
    """Every set of columns that the table's definition says is unique."""
    keys = [
        tuple(constraint.columns)
        for constraint in table.constraints
        if isinstance(constraint, sa.PrimaryKeyConstraint | sa.UniqueConstraint) and len(constraint.columns)
    ]
    return keys + [tuple(index.columns) for index in table.indexes if index.unique]


def met_by(table: sa.Table, conflict: Any) -> list[Columns]:
    """The keys by which an upsert can meet rows that are there; none when that is not known."""
    if isinstance(conflict, DO_UPDATE):
        target = conflict_target(table, conflict)
        return [] if target is None else [target]
    return unique_keys(table)


def conflict_target(table: sa.Table, conflict: Any) -> Columns | None:
    """The columns that ON CONFLICT names, by themselves or by their constraint; None when they are not known."""
    if getattr(conflict, "constraint_target", None) is not None:  # SQLite knows no names
        named: tuple[Any, ...] = (*table.constraints, *table.indexes)
        for constraint in named:
            if constraint.name == conflict.constraint_target:
                return tuple(constraint.columns)
        if conflict.constraint_target == f"{table.name}_pkey":
            return tuple(table.primary_key.columns)
        return None
    if conflict.inferred_target_elements is None:
        return None
    columns = [
        table.c.get(element if isinstance(element, str) else getattr(element, "key", None) or "")
        for element in conflict.inferred_target_elements
    ]
    return None if any(column is None for column in columns) else tuple(columns)  # type: ignore[arg-type]
