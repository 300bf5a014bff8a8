"""Every shape, and the combinations of shape and database that are left out, each with the reason."""

from __future__ import annotations

from guard_kit import core, flushes, inserts, statements, upserts
from guard_kit.databases import Dialect
from guard_kit.shape import SHAPES, Shape

__all__ = [
    "DEPENDS_ON_VERSION",
    "LEFT_OUT",
    "SHAPES",
    "Shape",
    "core",
    "flushes",
    "inserts",
    "statements",
    "upserts",
]

NO_UPDATE_RETURNING = "MariaDB has no UPDATE ... RETURNING"
NO_ALIAS_IN_DELETE = "MariaDB before 11.6 has no alias in DELETE"
NO_CTE_IN_UPDATE = "MariaDB before 12.3 has no WITH before UPDATE"
NO_DELETE_USING = "SQLite has no DELETE ... USING"
NO_ON_CONFLICT = "MariaDB has no ON CONFLICT: ON DUPLICATE KEY UPDATE is its upsert"
NO_ON_DUPLICATE_KEY = "only MySQL and MariaDB have ON DUPLICATE KEY UPDATE"
NO_NAMED_CONFLICT = "SQLite's ON CONFLICT names columns, not constraints"

LEFT_OUT: dict[tuple[str, Dialect], str] = {
    ("criteria_update_returning", "mariadb"): NO_UPDATE_RETURNING,
    ("core_update_returning", "mariadb"): NO_UPDATE_RETURNING,
    ("core_delete_from_an_alias", "mariadb"): NO_ALIAS_IN_DELETE,
    ("many_to_many_rows_deleted_through_an_alias", "mariadb"): NO_ALIAS_IN_DELETE,
    ("update_with_a_common_table_expression", "mariadb"): NO_CTE_IN_UPDATE,
    ("update_of_the_first_few", "mariadb"): NO_CTE_IN_UPDATE,
    ("delete_using_another_table", "sqlite"): NO_DELETE_USING,
    ("core_delete_using_another_table", "sqlite"): NO_DELETE_USING,
    ("upsert_by_a_named_constraint", "sqlite"): NO_NAMED_CONFLICT,
    **{
        (name, dialect): NO_ON_DUPLICATE_KEY
        for name in SHAPES
        for dialect in ("postgresql", "sqlite")
        if "on_duplicate_key" in name
    },
    **{
        (name, "mariadb"): NO_ON_CONFLICT
        for name in SHAPES
        if "upsert" in name or "where_it_meets" in name or "where_they_meet" in name
    },
}
"""A statement that the database does not have. The matrix tries each of them, to see that it is so."""

DEPENDS_ON_VERSION = {NO_ALIAS_IN_DELETE, NO_CTE_IN_UPDATE}
"""Except these, which a newer server may have."""
