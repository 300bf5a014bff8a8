"""The rule in SQL: the only place where the comparison of tokens meets a database's columns.

A guarded UPDATE or DELETE carries the rule in its WHERE, on the row's own columns: after a lock wait PostgreSQL
at READ COMMITTED rechecks exactly those. A guarded write stamps the row with the token and the holder. Both are
bound parameters of fixed names, so compiled statements are the same for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList, ColumnElement
from sqlalchemy.sql.selectable import Alias

from fencing.sql.fence import Fence

TOKEN, HOLDER = "fencing_token", "fencing_holder"
"""The names of the two parameters. A statement that lacks them was not guarded."""

Verb = Literal["insert", "upsert", "update", "delete"]
Params = Mapping[str, Any]


def admitted(fence: Fence, columns: Any = None) -> ColumnElement[bool]:
    """The rule of `fencing.token.admits`, over a row's columns: newer, or the same token of the same holder."""
    stored = fence.table.c if columns is None else columns
    token, holder = _binds(fence)
    own = stored[fence.token.key]
    return sa.or_(own < token, sa.and_(own == token, stored[fence.holder.key] == holder))


def refused(fence: Fence, columns: Any = None) -> ColumnElement[bool]:
    """What is not admitted; a NULL, where somebody made the columns nullable, is not."""
    return admitted(fence, columns).is_not(sa.true())


def _binds(fence: Fence) -> tuple[BindParameter[Any], BindParameter[Any]]:
    """The two parameters, always the same objects for a table: each further one costs every row of a batch."""
    kept: Any = fence.table.__dict__.get("_fencing_binds")
    if kept is None:
        kept = fence.table.__dict__["_fencing_binds"] = (
            sa.bindparam(TOKEN, type_=fence.token.type, required=True),
            sa.bindparam(HOLDER, type_=fence.holder_type, required=True),
        )
    return kept  # type: ignore[no-any-return]


def stamps(fence: Fence) -> dict[sa.Column[Any], BindParameter[Any]]:
    """What every guarded write sets."""
    return dict(zip((fence.token, fence.holder), _binds(fence), strict=True))


def table_of(statement: Any) -> tuple[sa.Table | None, Any]:
    """The table that a write goes to, and its columns as the statement knows them (an alias has its own)."""
    notes = statement._annotations
    target = notes.get("_emit_update_table")
    if target is None:
        target = notes.get("_emit_insert_table")
    if target is None:
        target = statement.table
    base = bare(target)
    return (base, target.c if isinstance(target, Alias) else base.c) if base is not None else (None, None)


def bare(target: Any) -> sa.Table | None:
    """The table under annotations and aliases; None when it is not one table."""
    while True:
        if type(target) is sa.Table:
            return target
        if isinstance(target, Alias):
            target = target.element
        elif target._annotations:
            target = target._deannotate()
        else:
            return target if isinstance(target, sa.Table) else None


def conjuncts(criteria: Sequence[Any]) -> Iterator[Any]:
    """The conditions that must all hold."""
    for each in criteria:
        if isinstance(each, BooleanClauseList) and each.operator is operators.and_:
            yield from conjuncts(each.clauses)
        else:
            yield each


def pins(criteria: Sequence[Any], table: sa.Table) -> Iterator[tuple[str, BindParameter[Any]]]:
    """Columns of the table that must equal one bound value."""
    for each in conjuncts(criteria):
        if isinstance(each, BinaryExpression) and each.operator is operators.eq:
            for column, value in ((each.left, each.right), (each.right, each.left)):
                if isinstance(value, BindParameter) and not value.expanding and of(column) is table:
                    yield str(column.key), value


def of(column: Any) -> sa.Table | None:
    """The table that a column belongs to."""
    table = getattr(column, "table", None)
    return None if table is None else bare(table)


def value_in(bind: BindParameter[Any], params: Params) -> Any:
    """What a bound value is in one set of parameters."""
    key = bind.key
    return params[key] if key in params else bind.effective_value  # noqa: SIM401  which may be costly


def sets_of(multiparams: Sequence[Params], params: Params) -> Sequence[Params]:
    """The sets of parameters, one for each time that the statement is carried out."""
    return multiparams or (params,)
