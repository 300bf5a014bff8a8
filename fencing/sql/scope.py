"""Whether a write stays within the resources of its lease, for tables whose rows are tied to one.

A lease on invoice:42 must not raise invoice:43's fence: that would shut out a live holder. So the resource of
every row is known before the statement is sent (from its values, or from what its WHERE binds), or, when rows are
addressed by primary key and the key does not say, the values that the lease allows go into the predicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter

from fencing.sql.binding import Guard
from fencing.sql.conflicts import met_by, sent_rows
from fencing.sql.fence import Fence
from fencing.sql.guard import Params, belongs, conjuncts, key_of, unverifiable, value_in, values_of
from fencing.sql.inserts import changes_of
from fencing.sql.plan import Plan
from fencing.sql.resource import Template
from fencing.sql.verdict import (
    Asker,
    among,
    keyed,
    wrong_resource,
)


def within(plan: Plan, guard: Guard, sets: Sequence[Params]) -> tuple[Any, dict[str, object]]:
    """The statement and its further parameters. WrongResource when the lease is about something else."""
    template = plan.fence.resource
    if template is None:
        return plan.statement, {}
    if plan.verb in ("insert", "upsert"):
        _insert_within(plan, template, guard, sets)
        return plan.statement, {}
    if plan.verb == "update":
        _stays_within(plan, template, guard, sets)
    if all(column.key in plan.pins for column in template.columns):
        for each in sets:
            pinned = {key: value_in(bind, each) for key, bind in plan.pins.items()}
            keys = plan.fence.table.primary_key.columns
            identity = tuple(pinned[column.key] for column in keys) if plan.by_key else None
            _check(plan.fence, guard, template, pinned, identity)
        return plan.statement, {}
    if (listed := _listed(plan, template, sets)) is not None:
        for value in listed:
            _check(plan.fence, guard, template, {template.columns[0].key: value})
        return plan.statement, {}
    if not plan.by_key:
        named = ", ".join(column.key for column in template.columns)
        raise wrong_resource(
            plan.fence,
            guard,
            f"this {plan.verb} of {plan.fence.name!r} may touch rows of others: "
            f"say in its WHERE which it is about, by {named} ({template.text!r})",
        )
    return _restricted(plan, template, guard)


def strayed(asker: Asker, plan: Plan, sets: Sequence[Params]) -> None:
    """Raise WrongResource when a row that was addressed by key belongs to another resource than the lease."""
    fence, template = plan.fence, plan.fence.resource
    if template is None or not plan.by_key or all(column.key in plan.pins for column in template.columns):
        return
    keys = tuple(fence.table.primary_key.columns)
    for columns, values in keyed(plan, sets):
        query = sa.select(*keys, *template.columns).where(among(asker.connection, columns, values))
        for row in asker.ask(query):
            found = dict(zip((column.key for column in template.columns), row[len(keys) :], strict=True))
            _check(fence, asker.guard, template, found, tuple(row[: len(keys)]))


def _check(
    fence: Fence,
    guard: Guard,
    template: Template,
    values: Mapping[str, Any],
    identity: tuple[object, ...] | None = None,
) -> None:
    resource = template.resource(values)
    if resource not in guard.grant.resources:
        raise wrong_resource(fence, guard, f"this row of {fence.name!r} belongs to {resource!r}", identity)


def _insert_within(plan: Plan, template: Template, guard: Guard, sets: Sequence[Params]) -> None:
    fence, statement = plan.fence, plan.statement
    rows = [{}] if statement.select is not None else sent_rows(statement, sets)
    for row in rows:
        if any(row.get(column.key) is None for column in template.columns):
            named = ", ".join(column.key for column in template.columns)
            raise wrong_resource(
                fence,
                guard,
                f"the resource of a new row of {fence.name!r} is not known before it is there: give {named}",
            )
        identity = tuple(row.get(column.key) for column in fence.table.primary_key.columns)
        _check(fence, guard, template, row, None if None in identity else identity)
    if plan.verb != "upsert":
        return
    conflict = statement._post_values_clause
    keys = met_by(fence.table, conflict)
    if not keys or not all(set(template.columns) <= set(key) for key in keys):
        named = ", ".join(column.key for column in template.columns)
        unverifiable(
            fence,
            f"an upsert may meet a row that belongs to another resource than the one it sends ({template.text!r}). "
            f"Make {named} part of its conflict target, or read first and then insert or update",
        )
    moved = {str(getattr(key, "key", key)) for key in changes_of(conflict)} & {
        column.key for column in template.columns
    }
    if moved:
        unverifiable(fence, f"it sets {', '.join(sorted(moved))}, which says what a row belongs to")


def _stays_within(plan: Plan, template: Template, guard: Guard, sets: Sequence[Params]) -> None:
    """An UPDATE that moves a row to another resource needs a lease on that one too."""
    keys = [column.key for column in template.columns]
    fixed = {key_of(key): value for key, value in values_of(plan.statement).items()}
    where = {bind.key for bind in plan.pins.values()}
    for each in sets:
        moved = {key: each[key] for key in keys if key in each and key not in where}
        for key in keys:
            if key in fixed:
                value = fixed[key]
                if not isinstance(value, BindParameter):
                    unverifiable(plan.fence, f"{key} says what a row belongs to, and is set to an expression")
                moved[key] = value_in(value, each)
        if moved:
            kept = {key: value_in(plan.pins[key], each) for key in keys if key in plan.pins}
            whole = {**kept, **moved}
            if set(whole) != set(keys):
                unverifiable(plan.fence, f"it sets {', '.join(moved)} alone of {', '.join(keys)}")
            _check(plan.fence, guard, template, whole)


def _listed(plan: Plan, template: Template, sets: Sequence[Params]) -> list[Any] | None:
    """The values of ``column.in_([...])``, where that is what the WHERE says."""
    if len(template.columns) != 1:
        return None
    for each in conjuncts(plan.criteria):
        if (
            isinstance(each, BinaryExpression)
            and each.operator is operators.in_op
            and isinstance(each.right, BindParameter)
            and each.right.expanding
            and belongs(each.left, plan.target)
            and getattr(each.left, "key", None) == template.columns[0].key
            and each.right.callable is None
        ):
            return [value for some in sets for value in value_in(each.right, some) or ()]
    return None


def _restricted(plan: Plan, template: Template, guard: Guard) -> tuple[Any, dict[str, object]]:
    """The statement with the values that the lease allows in its predicate."""
    allowed = template.values(guard.grant.resources)
    if not allowed:
        raise wrong_resource(plan.fence, guard, f"rows of {plan.fence.name!r} belong to {template.text!r}")
    names = [
        [f"fencing_scope_{at}_{column.key}" for column in template.columns] for at in range(len(allowed))
    ]
    kept: dict[int, Any] = plan.statement.__dict__.setdefault("_fencing_scoped", {})
    statement = kept.get(len(allowed))
    if statement is None:
        statement = plan.statement.where(
            sa.or_(
                *(
                    sa.and_(
                        *(
                            plan.target.c[column.key] == sa.bindparam(name, type_=column.type, required=True)
                            for column, name in zip(template.columns, row, strict=True)
                        )
                    )
                    for row in names
                )
            )
        )
        kept[len(allowed)] = statement
    extra: dict[str, object] = {}
    for row, values in zip(names, allowed, strict=True):
        extra.update(zip(row, values, strict=True))
    return statement, extra
