"""Which resource a row belongs to: ``"invoice:{id}"``, read in both directions.

Forwards, the values of a row give its resource. Backwards, the resources of a lease give the values that a
row must have; so a write by primary key can carry them in its predicate when the key alone does not say.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import inspect

from fencing.errors import ConfigurationError

_READS: dict[type, Any] = {int: int, str: str, UUID: UUID}


class Template(NamedTuple):
    """A resource's name with columns in braces."""

    text: str
    columns: tuple[sa.Column[Any], ...]
    """In the order in which they first appear."""
    fields: tuple[str, ...]

    @classmethod
    def of(cls, text: str, table: sa.Table, owner: type | None) -> Template:
        """ConfigurationError when it does not name columns of the table, or not plainly."""
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigurationError(f"{text!r} is no template of a resource: {error}") from None
        fields = tuple(dict.fromkeys(field for _, field, _, _ in parts if field is not None))
        plain = all(field.isidentifier() for field in fields)
        if not plain or any(spec or conversion for _, _, spec, conversion in parts):
            raise ConfigurationError(f"{text!r}: a resource takes columns as they are, like 'invoice:{{id}}'")
        if not fields:
            raise ConfigurationError(
                f"{text!r} names no column: without one every row would belong to one resource; "
                "leave __fence_resource__ out if that is so"
            )
        columns = tuple(_column(text, field, table, owner) for field in fields)
        return cls(text, columns, fields)

    def resource(self, values: Mapping[str, object]) -> str:
        """The resource of a row with these values, by column key."""
        return self.text.format(
            **{field: values[column.key] for field, column in zip(self.fields, self.columns, strict=True)}
        )

    def values(self, resources: Iterable[str]) -> list[tuple[object, ...]]:
        """For each of the resources that fits the template, the values of its columns."""
        return [found for resource in resources if (found := self._read(resource)) is not None]

    def _read(self, resource: str) -> tuple[object, ...] | None:
        match, other = (_pattern(self.text, value).fullmatch(resource) for value in (".+", ".+?"))
        if match is None or other is None or match.groups() != other.groups():
            return None  # it does not fit, or in more ways than one
        values = []
        for field, column in zip(self.fields, self.columns, strict=True):
            try:
                values.append(_READS[column.type.python_type](match[f"_{field}"]))
            except ValueError:
                return None
        keyed = {column.key: value for column, value in zip(self.columns, values, strict=True)}
        # Safe because what was read must spell the same resource again: '042' is not 42.
        return tuple(values) if self.resource(keyed) == resource else None


@functools.cache
def _pattern(text: str, value: str) -> re.Pattern[str]:
    pieces, seen = [], set()
    for literal, field, _, _ in string.Formatter().parse(text):
        pieces.append(re.escape(literal))
        if field is not None:
            pieces.append(f"(?P=_{field})" if field in seen else f"(?P<_{field}>{value})")
            seen.add(field)
    return re.compile("".join(pieces), re.DOTALL)


def _column(text: str, field: str, table: sa.Table, owner: type | None) -> sa.Column[Any]:
    column = table.c.get(field)
    if column is None and owner is not None:
        mapped: Any = inspect(owner).columns.get(field)
        column = None if mapped is None else table.c.get(mapped.key)
    if column is None:
        raise ConfigurationError(f"{text!r}: table {table.fullname!r} has no column {field!r}")
    if _python_type(column) not in _READS:
        raise ConfigurationError(
            f"{text!r}: {field!r} is a {column.type!r}; a resource is made of integers, text and UUIDs"
        )
    return column


def _python_type(column: sa.Column[Any]) -> type | None:
    try:
        return column.type.python_type
    except NotImplementedError:
        return None
