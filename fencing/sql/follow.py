"""Tables whose rows are protected by the fence of another row: a write to them claims that row first.

The table of a subclass in joined-table inheritance is part of its base row; the rows of a many-to-many table are
part of what they join. Neither has a fence, and a comparison with another table's fence inside the statement would
not be rechecked after a lock wait. So the rows they follow are claimed by a guarded write of their own, in the same
transaction, before the statement: their locks keep everybody else out until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.mapper import _all_registries

from fencing.errors import ConfigurationError
from fencing.sql.fence import FENCED_NAMES, Fence, fence_of


class Parent(NamedTuple):
    """A fenced table, and the columns by which rows of another one follow its rows."""

    fence: Fence
    own: tuple[Any, ...]
    """In the table that follows."""
    theirs: tuple[Any, ...]


class Follower(NamedTuple):
    table: sa.Table
    parents: tuple[Parent, ...]
    inserts: bool
    """Whether an INSERT claims too. Not in inheritance: there the base row is inserted first."""
    trouble: ConfigurationError | None = None
    """Why it cannot be told what the rows follow: raised when they are written, not before."""


_followers: dict[sa.Table, Follower] | None = None


def watch() -> None:
    """Find the followers anew whenever mappers have been configured."""
    if not event.contains(Mapper, "after_configured", _forget):
        event.listen(Mapper, "after_configured", _forget)


def _forget() -> None:
    global _followers
    _followers = None


def follower(table: sa.Table) -> Follower | None:
    """What the rows of an unfenced table follow, or None."""
    return ready().get(table)


def covered(table: sa.Table) -> bool:
    """Whether the table is fenced, or follows one that is."""
    return fence_of(table) is not None or follower(table) is not None


def configured() -> None:
    """Configure mappers that wait for it: a relationship is known only then.

    For writes under a guard, which come when an application is complete. Elsewhere it would be too early: what
    fails to be configured once fails for good.
    """
    for registry in _all_registries():
        if registry._new_mappers:
            try:
                registry.configure()
            except (SQLAlchemyError, ConfigurationError):  # it says so to those who use it
                continue


def ready() -> dict[sa.Table, Follower]:
    """All of them, with their names known to those who read text."""
    global _followers
    found = _followers
    if found is None:
        found = _followers = dict(_find())
        FENCED_NAMES.update({table.name.lower(): str(table.fullname) for table in found})
    return found


def _find() -> Iterator[tuple[sa.Table, Follower]]:
    joins: dict[sa.Table, list[Parent]] = {}
    troubles: dict[sa.Table, ConfigurationError] = {}
    for registry in _all_registries():
        for mapper in registry.mappers:
            own = mapper.local_table
            if isinstance(own, sa.Table) and not _fence(own):
                try:
                    base = _base(mapper)
                except ConfigurationError as error:
                    yield own, Follower(own, (), False, error)
                    continue
                if base is not None:
                    yield own, Follower(own, (base,), False)
            for relation in mapper.relationships if mapper.configured else ():
                table = relation.secondary
                if isinstance(table, sa.Table) and not _fence(table) and not relation.viewonly:
                    try:
                        sides = _side(relation.parent, relation.synchronize_pairs)
                        sides += _side(relation.mapper, relation.secondary_synchronize_pairs or ())
                    except ConfigurationError as error:
                        troubles[table] = error
                        continue
                    joins.setdefault(table, []).extend(sides)
    for table, parents in joins.items():
        if parents:
            yield table, Follower(table, tuple({parent.own: parent for parent in parents}.values()), True)
    for table, trouble in troubles.items():
        yield table, Follower(table, (), True, trouble)


def _fence(table: Any) -> Fence | None:
    """The table's fence. One that is declared wrongly says so when it is used, not when others are."""
    try:
        return fence_of(table) if isinstance(table, sa.Table) else None
    except ConfigurationError:
        return None


def _base(mapper: Mapper[Any]) -> Parent | None:
    """The fenced ancestor of a joined-table subclass."""
    if mapper.concrete or mapper.inherits is None:
        return None
    for ancestor in mapper.iterate_to_root():
        table = ancestor.local_table
        fence = _fence(table)
        if fence is not None:
            own = tuple(mapper.local_table.primary_key)
            theirs = tuple(_upwards(column, table) for column in own)
            return Parent(fence, own, theirs)
        if ancestor.concrete:
            return None
    return None


def _side(mapper: Mapper[Any], pairs: Sequence[tuple[Any, Any]]) -> list[Parent]:
    for table in mapper.tables:
        fence = _fence(table)
        if fence is not None:
            own = tuple(column for _, column in pairs)
            return [Parent(fence, own, tuple(_upwards(column, fence.table) for column, _ in pairs))]
    return []


def _upwards(column: Any, table: Any) -> Any:
    """The column of the (base) table that a key column refers to, over any number of foreign keys."""
    seen = {column}
    while column.table is not table:
        for key in column.foreign_keys:
            if key.column not in seen:
                column = key.column
                seen.add(column)
                break
        else:
            raise ConfigurationError(
                f"{column} does not lead to {table.fullname!r} by foreign keys, so that its fence cannot cover it"
            )
    return column
