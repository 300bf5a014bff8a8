"""Statement in, guarded statement out, with what is known of the rows that it may touch."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import FromClause
from sqlalchemy.sql.dml import Delete, Insert, Update
from sqlalchemy.sql.elements import BindParameter, ColumnElement
from sqlalchemy.sql.visitors import iterate

from fencing.sql.fence import Fence, fence_of
from fencing.sql.guard import (
    Verb,
    admitted,
    bare,
    belongs,
    key_of,
    pins,
    refuse_other_tables,
    refuse_replacing,
    stamps,
    target_of,
    values_of,
)
from fencing.sql.inserts import guarded_insert


class Plan(NamedTuple):
    """What a guarded statement is, and what is known of the rows that it may touch."""

    verb: Verb
    fence: Fence
    statement: Any
    """The guarded statement."""
    pins: dict[str, BindParameter[Any]]
    """Columns, by key, that the WHERE binds to one value each."""
    criteria: tuple[ColumnElement[bool], ...]
    """The WHERE as it was."""
    entity: Any
    """The mapper and options of an ORM statement that adds criteria of its own, or None."""
    looks_at_itself: bool
    """The WHERE depends on other rows of the table: what it says changes with the statement itself."""
    by_key: bool
    """Each set of parameters touches one row at the most."""
    target: Any
    """The table, or the alias that the statement uses."""
    settled: bool = False
    """The rows were looked at, and locked, before it was sent."""

    @property
    def plain(self) -> bool:
        """Whether there is nothing to look at before it is sent but its two parameters."""
        return self.fence.resource is None and (self.by_key or not self.looks_at_itself)


class Entity(NamedTuple):
    """The ORM's part in a criteria statement: what else it restricts."""

    mapper: Any
    entity: Any
    """The class, or the alias of it."""
    options: tuple[Any, ...]


_KEPT = (Update, Delete, Insert)
_PLANS: weakref.WeakKeyDictionary[Any, Plan] = weakref.WeakKeyDictionary()


def plan(statement: Any, fence: Fence) -> Plan:
    """The guarded form of a write to a fenced table. UnverifiableWrite if it cannot be made.

    Kept with the statement object: the unit of work uses the same one at each flush, and so its cache key is
    made once. Only of exact classes, because annotated statements compare equal when they are not.
    """
    made = kept_plan(statement)
    if made is None:
        made = _plan(statement, fence)
        made.statement.__dict__["_fencing_plan"] = made
        if type(statement) in _KEPT:
            _PLANS[statement] = made
    return made


def kept_plan(statement: Any) -> Plan | None:
    """The plan of a statement that was planned before, if it is still there."""
    if type(statement) not in _KEPT:
        return None
    kept = _PLANS.get(statement)
    if kept is not None and fence_of(kept.fence.table) is not kept.fence:
        return None  # the table was declared anew
    return kept


def plan_of(statement: Any) -> Plan | None:
    """The plan of a guarded statement, also when another listener has derived a new one from it."""
    try:
        found: Plan | None = statement.__dict__.get("_fencing_plan")
    except AttributeError:
        return None
    return found


def _plan(statement: Any, fence: Fence) -> Plan:
    target = target_of(statement)
    if isinstance(statement, Insert):
        verb, guarded = guarded_insert(statement, fence)
        return Plan(verb, fence, guarded, {}, (), None, False, False, target)
    criteria = tuple(statement._where_criteria)
    guarded = statement.where(admitted(fence, target))
    refuse_replacing(statement, fence.name)
    if isinstance(statement, Update):
        refuse_other_tables(statement, lambda table: fence_of(table) is not None)
        guarded = _stamped(guarded, fence)
    bound = dict(pins(criteria, target))
    keys = fence.table.primary_key.columns
    return Plan(
        "update" if isinstance(statement, Update) else "delete",
        fence,
        guarded,
        bound,
        criteria,
        _entity(statement),
        any(_looks_at_itself(each, fence.table, target) for each in criteria),
        bool(len(keys)) and all(column.key in bound for column in keys),
        target,
    )


def _stamped(statement: Any, fence: Fence) -> Any:
    """The statement with the fence in its SET, whatever else was said about those columns."""
    values: dict[Any, Any] = stamps(fence)
    ours = {column.key for column in values} | {column.name for column in values}
    given = {key: value for key, value in values_of(statement).items() if key_of(key) not in ours}
    statement = statement._generate()
    if getattr(statement, "_ordered_values", None):  # SQLAlchemy 2.0 keeps them apart
        statement._ordered_values = [*given.items(), *values.items()]
        return statement
    statement._values = None
    maintained = getattr(statement, "_maintain_values_ordering", False)
    statement._maintain_values_ordering = False
    statement = statement.values({**given, **values})
    if maintained:
        statement._maintain_values_ordering = True
    return statement


def _entity(statement: Any) -> Entity | None:
    found = statement.table._annotations.get("parententity")
    if found is None or statement._annotations.get("dml_strategy") == "bulk":
        return None
    return Entity(found.mapper, found.entity, statement._with_options)


def _looks_at_itself(criterion: Any, table: sa.Table, target: Any) -> bool:
    """Whether other rows of the table, by an alias of it or in a subquery, have a say in it."""
    for part in iterate(criterion):
        if getattr(part, "is_select", False) and _mentions(part, table, set()):
            return True
        whose = getattr(part, "table", None)
        other = isinstance(whose, FromClause) and not belongs(part, target)
        if other and (bare(whose) is table or _mentions(whose, table, set())):
            return True
    return False


def _mentions(element: Any, table: sa.Table, seen: set[int]) -> bool:
    """Whether the table is anywhere inside, also in what the columns come from."""
    for part in iterate(element):
        for whose in (part, getattr(part, "table", None)):
            if isinstance(whose, FromClause) and id(whose) not in seen:
                seen.add(id(whose))
                if bare(whose) is table or (whose is not part and _mentions(whose, table, seen)):
                    return True
    return False
