"""The rule in SQL: the only place where the comparison of tokens meets a database's columns.

A guarded UPDATE or DELETE carries the rule in its WHERE, on the row's own columns: after a lock wait PostgreSQL
at READ COMMITTED rechecks exactly those. A guarded write stamps the row with the token and the holder. Both are
bound parameters of fixed names, so compiled statements are the same for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList, ColumnElement
from sqlalchemy.sql.selectable import Alias

from fencing.errors import UnverifiableWrite
from fencing.sql.fence import Fence

TOKEN, HOLDER = "fencing_token", "fencing_holder"
"""The names of the two parameters. A statement that lacks them was not guarded."""

_OURS = "_fencing_ours"

Verb = Literal["insert", "upsert", "update", "delete"]
Params = Mapping[str, Any]


def admitted(fence: Fence, target: Any = None, new: Any = None) -> ColumnElement[bool]:
    """The rule of `fencing.token.admits`, over a row's columns: newer, or the same token of the same holder.

    `target` is the table, or the alias that the statement uses; `new` the row that an upsert would insert, whose
    fence stands for the parameters.
    """
    stored = (fence.table if target is None else target).c
    token, holder = _binds(fence) if new is None else (new[fence.token.key], new[fence.holder.key])
    own = stored[fence.token.key]
    return sa.or_(own < token, sa.and_(own == token, stored[fence.holder.key] == holder))


def refused(fence: Fence, target: Any = None) -> ColumnElement[bool]:
    """What is not admitted; a NULL, where somebody made the columns nullable, is not."""
    return admitted(fence, target).is_not(sa.true())


def _binds(fence: Fence) -> tuple[BindParameter[Any], BindParameter[Any]]:
    """The two parameters, always the same objects for a table: each further one costs every row of a batch."""
    kept: Any = fence.table.__dict__.get("_fencing_binds")
    if kept is None:
        kept = fence.table.__dict__["_fencing_binds"] = (
            sa.bindparam(TOKEN, type_=fence.token.type, required=True),
            sa.bindparam(HOLDER, type_=fence.holder_type, required=True),
        )
        kept[0].__dict__[_OURS] = True
    return kept  # type: ignore[no-any-return]


def guards(compiled: Any) -> bool:
    """Whether a compiled statement has the guard's parameter: ours, not one of that name."""
    return _OURS in getattr(compiled.binds.get(TOKEN), "__dict__", ())


def stamps(fence: Fence) -> dict[sa.Column[Any], BindParameter[Any]]:
    """What every guarded write sets."""
    return dict(zip((fence.token, fence.holder), _binds(fence), strict=True))


def target_of(statement: Any) -> Any:
    """What a write goes to: a table or an alias of one, without annotations; or a join."""
    notes = statement._annotations
    target = statement.table
    if notes:
        target = notes.get("_emit_update_table", notes.get("_emit_insert_table", target))
    return target._deannotate() if target._annotations else target


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


def pins(criteria: Sequence[Any], target: Any) -> Iterator[tuple[str, BindParameter[Any]]]:
    """Columns of the target that must equal one bound value. Another alias of the same table is not the target."""
    for each in conjuncts(criteria):
        if isinstance(each, BinaryExpression) and each.operator is operators.eq:
            for column, value in ((each.left, each.right), (each.right, each.left)):
                if not isinstance(value, BindParameter) or value.expanding or not belongs(column, target):
                    continue
                if value.callable is None:  # what one says now need not be what it says when it is sent
                    yield str(column.key), value


def belongs(column: Any, target: Any) -> bool:
    """Whether it is a column of just this table or alias."""
    table = getattr(column, "table", None)
    if table is None:
        return False
    return (table._deannotate() if table._annotations else table) is target


def value_in(bind: BindParameter[Any], params: Params) -> Any:
    """What a bound value is in one set of parameters."""
    key = bind.key
    return params[key] if key in params else bind.effective_value  # noqa: SIM401  which may be costly


def sets_of(multiparams: Sequence[Params], params: Params) -> Sequence[Params]:
    """The sets of parameters, one for each time that the statement is carried out."""
    return multiparams or (params,)


def key_of(column: Any) -> str:
    """By which key a statement names a column, given as one or as text."""
    return str(getattr(column, "key", column))


def values_of(statement: Any) -> dict[Any, Any]:
    """What an INSERT or UPDATE sets by itself; SQLAlchemy 2.0 keeps ordered values apart."""
    return dict(getattr(statement, "_ordered_values", None) or getattr(statement, "_values", None) or {})


def other_table(statement: Any, covered: Callable[[sa.Table], bool]) -> str | None:
    """A covered table that an UPDATE writes to besides its own (MySQL: UPDATE a, b SET b.x = ...), or None."""
    own = bare(target_of(statement))
    for key in values_of(statement):
        table = getattr(key, "table", None)
        found = bare(table) if isinstance(table, sa.FromClause) else None
        if found is not None and found is not own and covered(found):
            return str(found.fullname)
    return None


def refuse_other_tables(statement: Any, covered: Callable[[sa.Table], bool]) -> None:
    name = other_table(statement, covered)
    if name is not None:
        raise UnverifiableWrite(
            f"an UPDATE of several tables, {name!r} among them, cannot be verified: write them one after the other",
            table=name,
        )


def refuse_replacing(statement: Any, name: str) -> None:
    """INSERT OR REPLACE and UPDATE OR REPLACE (SQLite) delete rows that nobody compared."""
    for prefix, _ in getattr(statement, "_prefixes", ()):
        if "REPLACE" in str(prefix).upper():
            raise UnverifiableWrite(
                f"OR REPLACE deletes rows of {name!r} unseen: use on_conflict_do_update()", table=name
            )


def unverifiable(fence: Fence, why: str) -> NoReturn:
    raise UnverifiableWrite(
        f"this write to {fence.name!r} cannot be verified: {why}. Nothing of the transaction is committed",
        table=fence.name,
    )
