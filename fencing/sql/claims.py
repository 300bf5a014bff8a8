"""Claiming rows: raising their fence to the guard in force, by a guarded write of its own.

The rows that a statement's rows follow are claimed before it, in the same transaction: their locks keep everybody
else out until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.sql.dml import Insert, Update

from fencing.errors import UnverifiableWrite
from fencing.sql.binding import Guard
from fencing.sql.conflicts import met_by, plain_values, sent_rows
from fencing.sql.fence import Fence
from fencing.sql.follow import Follower, Parent
from fencing.sql.guard import Params, key_of, pins, refuse_replacing, target_of, value_in, values_of
from fencing.sql.inserts import changes_of, upserts
from fencing.sql.verdict import MOST, Asker, among, wrong_resource


def claim_parents(asker: Asker, found: Follower, statement: Any, sets: Sequence[Params]) -> Any:
    """Claim the rows that the statement's rows follow; the statement, restricted to them where it must be."""
    if found.trouble is not None:
        raise found.trouble.with_traceback(None)
    refuse_replacing(statement, str(found.table.fullname))
    if isinstance(statement, Insert):
        if found.inserts or upserts(statement):
            _claim(asker, found, _inserted(found, statement, sets))
        return statement
    target = target_of(statement)
    bound = dict(pins(statement._where_criteria, target))
    moved = _moved(found, statement, sets)
    if all(column.key in bound for parent in found.parents for column in parent.own):
        rows = [
            {
                column.key: value_in(bound[column.key], each)
                for parent in found.parents
                for column in parent.own
            }
            for each in sets
        ]
        _claim(asker, found, [*rows, *moved])
        return statement
    keyed_by = dict.fromkeys(column.key for parent in found.parents for column in parent.own)
    columns = [target.c[key] for key in keyed_by]
    query = sa.select(*columns).select_from(target).where(*statement._where_criteria).distinct()
    rows = []
    for each in sets:
        rows += [dict(row._mapping) for row in asker.ask(query.limit(MOST + 1), each)]
    if len(rows) > MOST:
        raise UnverifiableWrite(
            f"more than {MOST} rows of {found.table.fullname!r} at once: do it in batches",
            table=str(found.table.fullname),
        )
    _claim(asker, found, [*rows, *moved])
    # Safe because only rows whose parents are claimed are touched: one that has begun to match since is not.
    keys = [tuple(row[column.key] for column in columns) for row in rows]
    return statement.where(among(asker.connection, columns, keys))


def _inserted(found: Follower, statement: Any, sets: Sequence[Params]) -> list[dict[str, Any]]:
    keys = {column for parent in found.parents for column in parent.own}
    if statement.select is not None or (upserts(statement) and not _meets_only(found.table, statement, keys)):
        raise UnverifiableWrite(
            f"the rows that this INSERT into {found.table.fullname!r} follows are not known here: insert values, "
            "with no other conflict than on its key",
            table=str(found.table.fullname),
        )
    rows = sent_rows(statement, sets)
    named = {key_of(each) for each in values_of(statement)}
    named.update(key_of(each) for some in statement._multi_values or () for row in some for each in row)
    if any(key.key in named and key.key not in row for key in keys for row in rows):
        raise UnverifiableWrite(
            f"this INSERT into {found.table.fullname!r} gives its keys by expressions, so that it is not known here "
            "which rows it follows: insert values",
            table=str(found.table.fullname),
        )
    return [dict(row) for row in rows]


def _meets_only(table: sa.Table, statement: Any, keys: set[Any]) -> bool:
    """Whether an upsert changes none but rows that have the keys of the row it sends."""
    conflict = statement._post_values_clause
    met = met_by(table, conflict)
    changed = {key_of(key) for key in changes_of(conflict)}
    return bool(met) and all(keys <= set(key) for key in met) and not changed & {key.key for key in keys}


def _moved(found: Follower, statement: Any, sets: Sequence[Params]) -> list[dict[str, Any]]:
    """Where an UPDATE moves rows to."""
    if not isinstance(statement, Update):
        return []
    keys = {column.key for parent in found.parents for column in parent.own}
    changed = [{**each, **plain_values(values_of(statement), each)} for each in sets]
    named = {key_of(key) for key in values_of(statement)}
    if named & keys and not all(named & keys <= set(row) for row in changed):
        raise UnverifiableWrite(
            f"this UPDATE of {found.table.fullname!r} sets its keys to expressions",
            table=str(found.table.fullname),
        )
    return [row for row in changed if keys & set(row)]


def _claim(asker: Asker, found: Follower, rows: Sequence[dict[str, Any]]) -> None:
    """Claim what the rows follow. Of several, those that the lease is about; at least one for each row."""
    claims: dict[Parent, dict[tuple[Any, ...], None]] = {parent: {} for parent in found.parents}
    for row in rows:
        elsewhere = []
        for parent in found.parents:
            key = tuple(row.get(column.key) for column in parent.own)
            if None in key:
                continue
            if len(found.parents) > 1 and (apart := _elsewhere(parent, asker.guard, key)) is not None:
                elsewhere.append(apart)
            else:
                claims[parent][key] = None
        if elsewhere and len(elsewhere) == len(found.parents):
            raise wrong_resource(
                found.parents[0].fence,
                asker.guard,
                f"this row of {found.table.fullname!r} joins {' and '.join(map(repr, elsewhere))}",
            )
    for parent, keys in claims.items():
        claim(asker.connection, parent.fence, parent.theirs, list(keys), asker.options)


def _elsewhere(parent: Parent, guard: Guard, key: tuple[Any, ...]) -> str | None:
    """The resource of the row with this key, when the table says what it is and the lease is not about it."""
    template = parent.fence.resource
    if template is None or not set(template.columns) <= set(parent.theirs):
        return None
    resource = template.resource({c.key: v for c, v in zip(parent.theirs, key, strict=True)})
    return None if resource in guard.grant.resources else resource


def claim(
    connection: Connection,
    fence: Fence,
    columns: Sequence[sa.Column[Any]],
    keys: Sequence[tuple[Any, ...]],
    options: Mapping[str, Any] | None = None,
) -> int:
    """Raise the fence of these rows to the guard in force; how many there were, or -1 if nobody counted.

    A guarded UPDATE that sets nothing else.
    """
    if not keys:
        return 0
    names = [f"fencing_key_{at}" for at in range(len(columns))]
    rows = [dict(zip(names, key, strict=True)) for key in keys]
    schemas = (options or {}).get("schema_translate_map")
    result = connection.execute(
        _claiming(fence, tuple(columns)),
        rows,
        execution_options={"schema_translate_map": schemas} if schemas else {},
    )
    count = result.rowcount
    return count if len(keys) == 1 or connection.dialect.supports_sane_multi_rowcount else -1


def _claiming(fence: Fence, columns: tuple[sa.Column[Any], ...]) -> Any:
    kept = fence.table.__dict__.setdefault("_fencing_claims", {})
    statement = kept.get(columns)
    if statement is None:
        # Columns that change with every UPDATE stay as they are: nothing but the fence is raised.
        same = {column: column for column in fence.table.c if column.onupdate or column.server_onupdate}
        statement = kept[columns] = (
            sa.update(fence.table)
            .values(same)
            .where(
                *(
                    column == sa.bindparam(f"fencing_key_{at}", type_=column.type)
                    for at, column in enumerate(columns)
                )
            )
        )
    return statement
