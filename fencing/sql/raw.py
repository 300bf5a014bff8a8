"""SQL that is only text: whether it writes to a fenced table, as far as reading it tells.

A guard cannot rewrite text. This finds the usual ways in, so that they are refused under a guard and reported
without one; a procedure, a trigger or a view that writes is not found. That is what triggers in the database
are for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.selectable import TextualSelect

from fencing.sql.fence import FENCED_NAMES
from fencing.sql.guard import bare

_NOISE = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'", re.DOTALL)
_WORD = re.compile(r'[\w$]+|"[^"]+"|`[^`]+`|\[[^\]]+\]|\S')
_VERBS = {"insert", "update", "delete", "merge", "replace", "truncate", "copy"}


def written(text: str) -> str | None:
    """The fenced table that the text seems to write to, or None."""
    if not FENCED_NAMES:
        return None
    lower = text.lower()
    if not any(verb in lower for verb in _VERBS) or not any(name in lower for name in FENCED_NAMES):
        return None
    words = [word.strip('"`[]') for word in _WORD.findall(_NOISE.sub(" ", lower))]
    if not any(_verb(words, at) for at in range(len(words))):
        return None
    return next((FENCED_NAMES[word] for word in words if word in FENCED_NAMES), None)


_ENDS = {"commit", "end"}
_ENDS_ON_MYSQL = {
    *("begin", "start", "create", "alter", "drop", "rename", "truncate", "lock", "unlock", "grant", "revoke"),
    *(
        "analyze",
        "optimize",
        "repair",
        "check",
        "flush",
        "reset",
        "load",
        "cache",
        "install",
        "uninstall",
        "xa",
    ),
}


def ends_transaction(text: str, *, mysql: bool) -> bool:
    """Whether the text ends the transaction, by itself or as one of several statements.

    On MySQL and MariaDB most definitions commit, and so does the beginning of another transaction.
    """
    lower = text.lower()
    if mysql:  # where '#' begins a comment, and what stands in /*! */ is carried out
        lower = re.sub(r"#[^\n]*", " ", lower).replace("/*!", " ").replace("/*m!", " ")
    words = _WORD.findall(_NOISE.sub(" ", lower))
    for at, word in enumerate(words):
        if at and words[at - 1] != ";":
            continue
        after = words[at + 1 : at + 3]
        if word in _ENDS or (mysql and word in _ENDS_ON_MYSQL):
            return True
        if word == "prepare" and after[:1] == ["transaction"]:
            return True
        if mysql and word == "set" and "autocommit" in words:
            return True
        if word == "rollback" and after[:1] != ["to"] and after != ["work", "to"]:
            return True
    return False


def _verb(words: list[str], at: int) -> bool:
    word, before = words[at], words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    if word not in _VERBS or (after == "(" and word in ("replace", "insert")):
        return False
    if before in ("for", "key", "on"):  # SELECT ... FOR [NO KEY] UPDATE; ON DELETE CASCADE
        return False
    if word == "copy":
        return before in ("", ";") and "from" in words[at:]
    return before != "."


def written_by_cte(compiled: Any, covered: Callable[[sa.Table], bool]) -> str | None:
    """The table that a common table expression of the statement writes to, if it is covered by a fence, or None."""
    for cte in getattr(compiled, "ctes", None) or ():
        element = cte.element
        if isinstance(element, TextualSelect):
            if (name := written(str(element.element))) is not None:
                return name
        elif getattr(element, "is_dml", False):
            table = bare(element.table)
            if table is not None and covered(table):
                return str(table.fullname)
    return None
