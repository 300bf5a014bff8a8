"""The hooks on an engine: every statement passes here before it is sent, and every guarded commit.

Two nets. On the dialect, for every connection: what reaches the driver without the guard's parameters and writes to
a fenced table is refused or reported. It sees the compiled statement, so nothing that SQLAlchemy builds gets past it,
and an engine on which no lease is bound pays for nothing else. On guarded connections alone: statements are rewritten
(`before_execute`) and judged (`after_execute`), and commits are checked.

Events of an engine make each of its connections assemble its listeners anew, which costs more than the guard
itself. So those of guarded connections are assembled once for an engine, and handed to a connection when it is bound.
Should a future SQLAlchemy not heed that, guarded writes would lack their parameters, and the first net refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import FromStatement
from sqlalchemy.sql.visitors import iterate

from fencing.errors import ConfigurationError, FencingError, UnguardedWrite, UnverifiableWrite
from fencing.events import LoggingObserver, Observer, Observers, WriteAdmitted, WriteRefused, WriteUnguarded
from fencing.sql import follow
from fencing.sql.binding import Binding, Guard, Pass, binding_of, speaks
from fencing.sql.commit import BEGINS, TWO_PHASE, begin_for_real, failed, may_begin, may_commit
from fencing.sql.fence import Fence, fence_of
from fencing.sql.guard import TOKEN, Params, bare, other_table, refuse_other_tables, sets_of, target_of
from fencing.sql.plan import plan, plan_of
from fencing.sql.raw import ends_transaction, written, written_by_cte
from fencing.sql.scope import strayed, within
from fencing.sql.verdict import REASONS, Asker, bound, judge, proven, settled

Unguarded = Literal["refuse", "warn"]
Mode = Guard | Pass | None

_HOOKS = "_fencing_hooks"
_LISTENERS = "_fencing_listeners"
_ARMED = "_fencing_armed"


def install(
    engine: Engine | AsyncEngine,
    *,
    unguarded: Unguarded | None = None,
    observers: Iterable[Observer] | None = None,
) -> None:
    """Put the guard on an engine, once, next to `create_engine`. Called again it changes the settings.

    `unguarded`: what happens to a write to a fenced table that has no guard: ``"refuse"`` (the default) raises
    `UnguardedWrite`; ``"warn"`` lets it through and tells the `observers` (a logger, when none are given), for a
    staged roll-out. Statements that touch no fenced table are not changed.

    Example::

        engine = create_engine(...)
        install(engine)
    """
    if unguarded not in (None, "refuse", "warn"):
        raise ConfigurationError(f"unguarded is 'refuse' or 'warn', not {unguarded!r}")
    if isinstance(engine, AsyncEngine):
        engine = engine.sync_engine
    if not isinstance(engine, Engine):
        raise ConfigurationError(f"install() takes an Engine or AsyncEngine, not {engine!r}")
    hooks = hooks_of(engine)
    if hooks is None:
        hooks = engine.__dict__[_HOOKS] = Hooks()
        hooks.listen(engine)
        follow.watch()
    if unguarded is not None:
        hooks.refuses = unguarded == "refuse"
    if observers is not None:
        hooks.observers = Observers(observers)


def hooks_of(engine: Engine) -> Hooks | None:
    """The hooks of an engine, or of the one it was derived from by options: they share a dialect."""
    found: Any = engine
    while found is not None:
        hooks: Hooks | None = found.__dict__.get(_HOOKS)
        if hooks is not None:
            return hooks
        found = getattr(found, "_proxied", None)
    return None


def arm(connection: Connection) -> None:
    """Let the connection's statements and commits pass through the guard from now on."""
    if _ARMED in connection.__dict__:
        return
    connection.__dict__[_ARMED] = "by itself"
    engine = connection.engine
    hooks = hooks_of(engine)
    assert hooks is not None
    if connection._has_events or engine._has_events:  # somebody listens already, and goes on listening
        hooks.listen_to(connection)
        return
    listeners = engine.__dict__.get(_LISTENERS)
    if listeners is None:
        apart = Engine(engine.pool, engine.dialect, engine.url)  # a stand-in that nobody connects with
        hooks.listen_to(apart)
        listeners = engine.__dict__[_LISTENERS] = apart.dispatch
    connection.dispatch = listeners
    connection._has_events = 1  # type: ignore[assignment]  # until somebody listens to it, who says True
    connection.__dict__[_ARMED] = "shared"


def _unshare(connection: Connection) -> None:
    """Somebody listens to a connection that shares its listeners: later connections shall not tell him."""
    if connection.__dict__.get(_ARMED) == "shared":
        connection.__dict__[_ARMED] = "by itself"
        connection.engine.__dict__.pop(_LISTENERS, None)


class Hooks:
    """The listeners of one engine, and its settings."""

    def __init__(self) -> None:
        self.refuses = True
        self.observers = Observers((LoggingObserver(),))

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "do_execute", self.do_execute)
        event.listen(engine, "do_executemany", self.do_execute)
        event.listen(engine, "do_execute_no_params", self.do_execute_no_params)
        event.listen(engine, "handle_error", self.handle_error)

    def listen_to(self, target: Connection | Engine) -> None:
        """Guard a connection, or all that are handed the listeners of this stand-in for an engine."""
        event.listen(target, "before_execute", self.before_execute, retval=True)
        event.listen(target, "after_execute", self.after_execute)
        event.listen(target, "begin", self.begin)
        event.listen(target, "commit", self.commit)
        event.listen(target, "rollback", self.rollback)
        event.listen(target, "begin_twophase", self.begin_twophase)

    # The first net: every statement

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
            name, what = written_by_cte(compiled), "DML in a common table expression"
        if name is not None:
            self.text(connection, name, what)
        if context.isinsert or context.isupdate or context.isdelete:
            if TOKEN not in compiled.binds:
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
            if ends_transaction(statement):
                raise ConfigurationError(
                    f"{what} that commits is refused under a guard: use commit() of the session or connection"
                )

    def unstamped(self, connection: Connection, context: Any) -> None:
        """A write without the guard's parameters: refused when its table is fenced, or follows one that is."""
        state = context.compiled.compile_state
        table = None if state is None else bare(state.dml_table)
        verb = "insert" if context.isinsert else "update" if context.isupdate else "delete"
        mode = mode_of(connection)
        if table is None:
            fenced, name = True, _in_a_join(state)
        elif fence_of(table) is not None or follow.follower(table) is not None:
            fenced, name = fence_of(table) is not None, str(table.fullname)
        else:
            fenced, name = True, other_table(state.statement) if context.isupdate else None
        if name is None:
            return
        if not isinstance(mode, Guard):
            self.unguarded(mode, name, verb)
        elif fenced:
            lost = UnverifiableWrite(
                f"a write to {name!r} reached the database without its guard: it goes to a join of tables, or was "
                "compiled by hand, or another listener has replaced it",
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
                f"{verb} of {table!r}, which is fenced, without a guard. Hold a lease and use "
                "guarded(session, lease); or unguarded(session, reason=...) when it is meant to be so",
                table=table,
            )

    def tell_unguarded(self, table: str, verb: str, *, allowed: bool, reason: str) -> None:
        if WriteUnguarded in self.observers.wanted:
            self.observers(
                WriteUnguarded(
                    namespace="", resource="", table=table, verb=verb, allowed=allowed, reason=reason
                )
            )

    def handle_error(self, context: Any) -> None:
        connection = context.connection
        binding = None if connection is None else binding_of(connection)
        if binding is not None:
            failed(context, binding)

    # The second: statements of guarded connections

    def before_execute(
        self,
        connection: Connection,
        statement: Any,
        multiparams: Sequence[Params],
        params: Params,
        options: Any,
    ) -> tuple[Any, Any, Any]:
        if connection._has_events is True:
            _unshare(connection)
        guard = mode_of(connection)
        if type(guard) is not Guard:
            return statement, multiparams, params
        guard.check()
        if not getattr(statement, "is_dml", False):  # a Compiled has none: the first net looks at those
            return statement, multiparams, params
        if statement.__visit_name__ == "lambda_element":
            statement = statement._resolved._annotate(statement._annotations)
        if isinstance(statement, FromStatement):  # rows that a write returns, read as objects
            inner, multiparams, params = self.before_execute(
                connection, statement.element, multiparams, params, options
            )
            return _around(statement, inner), multiparams, params
        table = bare(target_of(statement))
        if table is None:
            return statement, multiparams, params
        fence = fence_of(table)
        try:
            if fence is not None:
                return self.guard(connection, guard, fence, statement, multiparams, params, options)
            refuse_other_tables(statement)
            found = follow.follower(table)
            if found is not None:
                asker = Asker(connection, guard, options)
                statement = follow.claim_parents(asker, found, statement, sets_of(multiparams, params))
        except FencingError as error:
            mark(connection, guard, str(table.fullname), statement.__visit_name__, error)
            raise
        return statement, multiparams, params

    def guard(
        self,
        connection: Connection,
        guard: Guard,
        fence: Fence,
        statement: Any,
        multiparams: Sequence[Params],
        params: Params,
        options: Any,
    ) -> tuple[Any, Any, Any]:
        """The guarded form of a write to a fenced table, with its parameters."""
        made = plan(statement, fence)
        final, extra = made.statement, bound(guard, fence)
        if fence.resource is not None:
            final, scope = within(made, guard, sets_of(multiparams, params))
            extra.update(scope)
        if made.looks_at_itself and not made.by_key:
            final = settled(Asker(connection, guard, options), made, sets_of(multiparams, params))
        # What they say of the fence does not count.
        sets, own = sets_of(multiparams, params), fence.keys
        if own[0] in sets[0] or own[1] in sets[0]:
            sets = [{key: each[key] for key in each if key not in own} for each in sets]
        if multiparams:
            return final, [{**each, **extra} for each in sets], params
        return final, multiparams, {**sets[0], **extra}

    def after_execute(
        self,
        connection: Connection,
        statement: Any,
        multiparams: Sequence[Params],
        params: Params,
        options: Any,
        result: Any,
    ) -> None:
        made = plan_of(statement)
        if made is None:
            return
        guard = mode_of(connection)
        assert isinstance(guard, Guard)
        if not proven(made, len(multiparams) or 1, result, connection.dialect):
            try:
                asker, sets = Asker(connection, guard, options), sets_of(multiparams, params)
                judge(asker, made, sets, result)
                strayed(asker, made, sets)
            except FencingError as error:
                result.close()  # rows that nobody will read keep SQLite's lock
                mark(connection, guard, made.fence.name, made.verb, error)
                raise
        if WriteAdmitted in guard.observers.wanted:
            guard.tell(WriteAdmitted, table=made.fence.name, verb=made.verb)

    # Their transactions

    def begin(self, connection: Connection) -> None:
        binding = binding_of(connection)
        if binding is not None:
            may_begin(connection, binding)

    def begin_twophase(self, connection: Connection, xid: Any) -> None:
        binding = binding_of(connection)
        if binding is not None and binding.guard(connection) is not None:
            raise ConfigurationError(TWO_PHASE)

    def commit(self, connection: Connection) -> None:
        binding = binding_of(connection)
        if binding is not None:
            may_commit(connection, binding)

    def rollback(self, connection: Connection) -> None:
        binding = binding_of(connection)
        if binding is not None:
            binding.ended(connection)


def _in_a_join(state: Any) -> str | None:
    """A fenced table in the join that is written to (MySQL has such statements), or None."""
    for table in iterate(state.dml_table) if state is not None else ():
        if isinstance(table, sa.Table) and fence_of(table) is not None:
            return str(table.fullname)
    return None


def _around(statement: Any, inner: Any) -> Any:
    """The same reading of rows, from another write."""
    outer = statement._generate()
    outer.element = inner
    if (made := plan_of(inner)) is not None:
        outer.__dict__["_fencing_plan"] = made
    return outer


def mode_of(connection: Connection) -> Mode:
    """The guard of the connection, or its way out, or None."""
    binding = binding_of(connection)
    return None if binding is None else binding.mode(connection)


def mark(connection: Connection, guard: Guard, table: str, verb: str, error: FencingError) -> None:
    """Tell the observers of a refusal, and that nothing of the transaction may be committed."""
    binding = binding_of(connection)
    assert isinstance(binding, Binding)
    first = binding.rejected.setdefault(connection, error)
    reason = REASONS.get(type(error))
    if first is error and reason is not None:
        guard.tell(WriteRefused, table=table, verb=verb, reason=reason, error=str(error))
