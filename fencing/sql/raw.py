"""SQL that is only text: whether it writes to a fenced table, as far as reading it tells.

A guard cannot rewrite text. This finds the usual ways in, so that they are refused under a guard and reported
without one; a procedure, a trigger or a view that writes is not found. That is what triggers in the database
are for.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.sql.selectable import TextualSelect

from fencing.sql.fence import FENCED_NAMES, fence_of
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


def ends_transaction(text: str) -> bool:
    """Whether the text commits, by itself or as one of several statements."""
    lower = text.lower()
    if "commit" not in lower and "end" not in lower and "prepare" not in lower:
        return False
    words = _WORD.findall(_NOISE.sub(" ", lower))
    for at, word in enumerate(words):
        if (at == 0 or words[at - 1] == ";") and (
            word in ("commit", "end") or words[at : at + 2] == ["prepare", "transaction"]
        ):
            return True
    return False


def _verb(words: list[str], at: int) -> bool:
    word, before = words[at], words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    if word not in _VERBS or (after == "(" and word in ("replace", "insert")):
        return False
    if word == "update" and before in ("for", "key"):  # SELECT ... FOR [NO KEY] UPDATE
        return False
    if word == "copy":
        return "from" in words[at:]
    return before != "."


def written_by_cte(compiled: Any) -> str | None:
    """The fenced table that a common table expression of the statement writes to, or None."""
    for cte in getattr(compiled, "ctes", None) or ():
        element = cte.element
        if isinstance(element, TextualSelect):
            if (name := written(str(element.element))) is not None:
                return name
        elif getattr(element, "is_dml", False):
            table = bare(element.table)
            if table is not None and fence_of(table) is not None:
                return str(table.fullname)
    return None
