"""The first net: every statement of an engine passes here on its way to the driver.

It sees the compiled statement, with the table that it really writes to and the parameters that it really has. What
writes to a fenced table without the guard's parameters is refused, or reported, whoever left them out.
"""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.sql.visitors import iterate

from fencing.errors import ConfigurationError, UnguardedWrite, UnverifiableWrite
from fencing.events import LoggingObserver, Observers, WriteUnguarded
from fencing.sql import follow
from fencing.sql.binding import Guard, Pass, binding_of, current, mark, mode_of, speaks
from fencing.sql.commit import BEGINS, begin_for_real
from fencing.sql.fence import DECLARED, FENCED_NAMES, fence_of
from fencing.sql.guard import bare, guards, other_table
from fencing.sql.raw import ends_transaction, written, written_by_cte

_WRITES = "_fencing_writes"
CLAIMED = "_fencing_claimed"
"""The statement for which a connection has just claimed the rows that are followed."""
Kind = Literal["fenced", "follower", "namesake"]


class Net:
    """The first net of one engine, and its settings."""

    def __init__(self) -> None:
        self.refuses = True
        self.observers = Observers((LoggingObserver(),))

    def do_execute(self, cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        connection = context.root_connection
        speaks(connection)
        if BEGINS in connection.__dict__:
            begin_for_real(connection, statement)
        compiled = context.compiled
        name = None
        if compiled is None or context.is_text or not (context.is_crud or statement.startswith("SELECT")):
            what = "driver SQL" if compiled is None else "text"
            self.ends(connection, statement, what)
            if not getattr(compiled, "ctes", None):
                follow.ready()
                name = written(statement)
        if getattr(compiled, "ctes", None):
            name, what = written_by_cte(compiled, follow.covered), "DML in a common table expression"
        if name is not None:
            self.text(connection, name, what)
        if context.isinsert or context.isupdate or context.isdelete:
            if not guards(compiled):
                self.unstamped(connection, context)
            elif context.isinsert:
                # Otherwise the count of an upsert is lost with the cursor.
                context.execution_options = context.execution_options.union({"preserve_rowcount": True})

    def do_execute_no_params(self, cursor: Any, statement: str, context: Any) -> None:
        self.do_execute(cursor, statement, None, context)

    def ends(self, connection: Connection, statement: str, what: str) -> None:
        """Text under a guard: not without the lease, and it must not end the transaction past the checks."""
        binding = binding_of(connection)
        guard = None if binding is None else binding.guard(connection)
        if guard is not None:
            guard.check()
            mysql = connection.dialect.name in ("mysql", "mariadb")
            if ends_transaction(statement, mysql=mysql):
                raise ConfigurationError(
                    f"{what} that ends the transaction is refused under a guard: use commit() or rollback() of the "
                    "session or connection" + (" (definitions commit on MySQL)" if mysql else "")
                )

    def unstamped(self, connection: Connection, context: Any) -> None:
        """A write without the guard's parameters: refused when its table is fenced, or follows one that is."""
        kept = context.compiled.__dict__
        # Safe because the epoch is taken first: what changes while we look makes the next one look again.
        now = follow.ready(), len(DECLARED)
        followers, declared, kind, name = kept.get(_WRITES, (None, 0, "fenced", None))
        if (
            followers is not now[0] or declared != now[1]
        ):  # not looked at yet; or mappers or tables have come since
            kind, name = _written(context)
            kept[_WRITES] = *now, kind, name
        if name is None:
            return
        verb = "insert" if context.isinsert else "update" if context.isupdate else "delete"
        mode = mode_of(connection)
        if not isinstance(mode, Guard):
            if kind == "namesake":  # as with text: it may be another database's
                self.tell_unguarded(name, verb, allowed=True, reason="name" if mode is None else mode.reason)
            else:
                self.unguarded(mode, name, verb)
        elif kind != "follower" or connection.__dict__.get(CLAIMED) is not context.invoked_statement:
            lost = UnverifiableWrite(
                f"a write to {name!r} reached the database without its guard: it goes to a join of tables, or to "
                "another Table object of that name without a fence, or was compiled by hand, or another listener has "
                "replaced it",
                table=name,
            )
            mark(connection, mode, name, verb, lost)
            raise lost

    def text(self, connection: Connection, table: str, what: str) -> None:
        """What the guard cannot read: refused under a guard; without one it is reported, and let through."""
        mode = mode_of(connection)
        if isinstance(mode, Guard):
            unseen = UnverifiableWrite(
                f"{what} that writes to {table!r} cannot be guarded: build it with SQLAlchemy's insert(), "
                "update() or delete(), or say unguarded(session, reason=...)",
                table=table,
            )
            mark(connection, mode, table, what, unseen)
            raise unseen
        self.tell_unguarded(table, what, allowed=True, reason="text" if mode is None else mode.reason)

    def unguarded(self, mode: Pass | None, table: str, verb: str) -> None:
        """A write to a fenced table without a guard."""
        if mode is not None:
            self.tell_unguarded(table, verb, allowed=True, reason=mode.reason)
            return
        self.tell_unguarded(
            table, verb, allowed=not self.refuses, reason="refused" if self.refuses else "warn"
        )
        if self.refuses:
            raise UnguardedWrite(
                f"{verb} of {table!r}, which is fenced or follows a fence, without a guard. {_advice()}; or use "
                "unguarded(session, reason=...) when it is meant to be so",
                table=table,
            )

    def tell_unguarded(self, table: str, verb: str, *, allowed: bool, reason: str) -> None:
        if WriteUnguarded in self.observers.wanted:
            self.observers(
                WriteUnguarded(
                    namespace="", resource="", table=table, verb=verb, allowed=allowed, reason=reason
                )
            )


def _written(context: Any) -> tuple[Kind, str | None]:
    """What a statement without the guard's parameters writes to, if that is anything of ours."""
    state = context.compiled.compile_state
    target = None if state is None else state.dml_table
    table = target if type(target) is sa.TableClause else None if target is None else bare(target)
    if table is None:
        return "fenced", _in_a_join(state)
    if isinstance(table, sa.Table) and follow.covered(table):
        return "fenced" if fence_of(table) is not None else "follower", str(table.fullname)
    if context.isupdate and (other := other_table(state.statement, follow.covered)) is not None:
        return "fenced", other
    named = FENCED_NAMES.get(table.name.lower())
    # Another description of a fenced table: of another MetaData, or by `sa.table()`, which is all name.
    same = named == (f"{table.schema}.{table.name}" if table.schema else table.name)
    return "namesake", named if same else None


def _advice() -> str:
    lease = current.get()
    if lease is None:
        return "Hold a lease and use guarded(session, lease)"
    return (
        f"A lease on {lease.resource!r} is in use here, but this is no FencedSession, or its transaction began "
        "before using(): use guarded(session, lease)"
    )


def _in_a_join(state: Any) -> str | None:
    """A fenced table in the join that is written to (MySQL has such statements), or None."""
    for table in iterate(state.dml_table) if state is not None else ():
        if isinstance(table, sa.Table) and fence_of(table) is not None:
            return str(table.fullname)
    return None
