"""What a shape is: a small write on a known world, and which rows it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from guard_kit.databases import Key, Write
from guard_kit.models import World

Rows = dict[str, frozenset[Key]]
"""Rows by the name of their table."""


@dataclass(frozen=True, eq=False)
class Shape:
    """One way to write.

    Only fenced rows are named here. `writes` includes rows whose fence alone is raised, because the write is to a
    table that follows them.
    """

    name: str
    write: Write
    world: World
    writes: Rows
    deletes: Rows
    adds: Mapping[str, int]
    """How many rows are new."""
    spares: Rows = field(default_factory=dict)
    """Rows that the statement names and leaves alone: not written, and when they are newer it may be refused."""

    @cached_property
    def targets(self) -> list[tuple[str, Key]]:
        """Every fenced row that is there before and that it writes or deletes."""
        named = [
            (table, key) for rows in (self.writes, self.deletes) for table in rows for key in rows[table]
        ]
        return sorted(named)

    def named(self, table: str, key: Key) -> bool:
        return any(key in rows.get(table, ()) for rows in (self.writes, self.deletes, self.spares))


SHAPES: dict[str, Shape] = {}


def shape(
    world: Mapping[Any, list[dict[str, Any]]],
    *,
    writes: Mapping[Any, Iterable[Any]] | None = None,
    deletes: Mapping[Any, Iterable[Any]] | None = None,
    adds: Mapping[Any, int] | None = None,
    spares: Mapping[Any, Iterable[Any]] | None = None,
) -> Callable[[Write], Write]:
    """Enter the function into `SHAPES`, under its own name."""

    def enter(write: Write) -> Write:
        assert write.__name__ not in SHAPES, f"two shapes are called {write.__name__}"
        SHAPES[write.__name__] = Shape(
            write.__name__,
            write,
            {table_of(each): rows for each, rows in world.items()},
            _rows(writes),
            _rows(deletes),
            {table_of(each).fullname: count for each, count in (adds or {}).items()},
            _rows(spares),
        )
        return write

    return enter


def table_of(each: Any) -> sa.Table:
    return each if isinstance(each, sa.Table) else each.__table__


def _rows(named: Mapping[Any, Iterable[Any]] | None) -> Rows:
    return {
        table_of(each).fullname: frozenset(key if isinstance(key, tuple) else (key,) for key in keys)
        for each, keys in (named or {}).items()
    }
