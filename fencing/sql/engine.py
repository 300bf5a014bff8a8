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

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import FromStatement

from fencing.errors import ConfigurationError, FencingError, UnverifiableWrite
from fencing.events import Observer, Observers, WriteAdmitted
from fencing.sql import follow
from fencing.sql.binding import Guard, binding_of, mark, mode_of, unverified
from fencing.sql.claims import claim_parents
from fencing.sql.commit import TWO_PHASE, failed, may_begin, may_commit
from fencing.sql.fence import Fence, fence_of
from fencing.sql.guard import Params, bare, refuse_other_tables, sets_of, target_of
from fencing.sql.net import CLAIMED, Net
from fencing.sql.plan import kept_plan, plan, plan_of
from fencing.sql.scope import strayed, within
from fencing.sql.verdict import Asker, bound, judge, proven, settled

Unguarded = Literal["refuse", "warn"]

_HOOKS = "_fencing_hooks"
_LISTENERS = "_fencing_listeners"
_ARMED = "_fencing_armed"
_INSTALLING = threading.Lock()


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
    with _INSTALLING:
        hooks = hooks_of(engine)
        if hooks is None:
            hooks = Hooks()
            follow.watch()
            hooks.listen(engine)
            engine.dialect.__dict__[_HOOKS] = hooks  # last: who finds them may rely on them
    if unguarded is not None:
        hooks.net.refuses = unguarded == "refuse"
    if observers is not None:
        hooks.net.observers = Observers(observers)


def hooks_of(engine: Engine) -> Hooks | None:
    """The hooks of an engine, and of those that were derived from it by options: they share a dialect."""
    hooks: Hooks | None = engine.dialect.__dict__.get(_HOOKS)
    return hooks


def arm(connection: Connection) -> None:
    """Let the connection's statements and commits pass through the guard from now on."""
    if _ARMED in connection.__dict__:
        return
    engine = connection.engine
    listeners = engine.__dict__.get(_LISTENERS)
    if connection._has_events or engine._has_events:  # somebody listens already, and goes on listening
        connection.__dict__[_ARMED] = "by itself"
        _hooks_for(engine).listen_to(connection)
        return
    if listeners is None:
        apart = Engine(engine.pool, engine.dialect, engine.url)  # a stand-in that nobody connects with
        _hooks_for(engine).listen_to(apart)
        listeners = engine.__dict__[_LISTENERS] = apart.dispatch
    connection.dispatch = listeners
    connection._has_events = 1  # type: ignore[assignment]  # until somebody listens to it, who says True
    connection.__dict__[_ARMED] = "shared"


def _hooks_for(engine: Engine) -> Hooks:
    """The hooks of the engine, installed if somebody forgot to."""
    if hooks_of(engine) is None:
        install(engine)
    hooks = hooks_of(engine)
    assert hooks is not None
    return hooks


def _unshare(connection: Connection) -> None:
    """Somebody listens to a connection that shares its listeners: later connections shall not tell him."""
    if connection.__dict__.get(_ARMED) == "shared":
        connection.__dict__[_ARMED] = "by itself"
        connection.engine.__dict__.pop(_LISTENERS, None)


class Hooks:
    """The listeners of one engine."""

    def __init__(self) -> None:
        self.net = Net()

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "do_execute", self.net.do_execute)
        event.listen(engine, "do_executemany", self.net.do_execute)
        event.listen(engine, "do_execute_no_params", self.net.do_execute_no_params)
        event.listen(engine, "handle_error", self.handle_error)

    def listen_to(self, target: Connection | Engine) -> None:
        """Guard a connection, or all that are handed the listeners of this stand-in for an engine."""
        event.listen(target, "before_execute", self.before_execute, retval=True)
        event.listen(target, "after_execute", self.after_execute)
        event.listen(target, "begin", self.begin)
        event.listen(target, "commit", self.commit)
        event.listen(target, "rollback", self.rollback)
        event.listen(target, "rollback_savepoint", self.rollback_savepoint)
        event.listen(target, "begin_twophase", self.begin_twophase)

    # Statements of guarded connections

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
        known = kept_plan(statement)
        if known is not None and known.plain:
            extra = bound(guard, known.fence)
            return self.with_params(connection, known.statement, extra, known.fence, multiparams, params)
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
            follow.configured()
            refuse_other_tables(statement, follow.covered)
            found = follow.follower(table)
            if found is not None:
                asker = Asker(connection, guard, options)
                statement = claim_parents(asker, found, statement, sets_of(multiparams, params))
                connection.__dict__[CLAIMED] = statement
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
            # Safe because `within` has added nothing to the statement then: it does so by key alone.
            final = settled(Asker(connection, guard, options), made, sets_of(multiparams, params))
        return self.with_params(connection, final, extra, fence, multiparams, params)

    def with_params(
        self,
        connection: Connection,
        statement: Any,
        extra: Params,
        fence: Fence,
        multiparams: Sequence[Params],
        params: Params,
    ) -> tuple[Any, Any, Any]:
        """The statement with the guard's parameters; what the others say of the fence does not count."""
        unverified(connection, fence.name)
        sets, own = sets_of(multiparams, params), fence.keys
        if own[0] in sets[0] or own[1] in sets[0]:
            sets = [{key: each[key] for key in each if key not in own} for each in sets]
        if multiparams:
            return statement, [{**each, **extra} for each in sets], params
        return statement, multiparams, {**sets[0], **extra}

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
            except BaseException as error:
                result.close()  # rows that nobody will read keep SQLite's lock
                mark(connection, guard, made.fence.name, made.verb, _refusal(error, made.fence))
                unverified(connection, None)  # it is judged: refused
                raise
        unverified(connection, None)
        if WriteAdmitted in guard.observers.wanted:
            guard.tell(WriteAdmitted, table=made.fence.name, verb=made.verb)

    # Their transactions

    def handle_error(self, context: Any) -> None:
        connection = context.connection
        binding = None if connection is None else binding_of(connection)
        if binding is not None:
            failed(context, binding)

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

    def rollback_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        unverified(connection, None)  # what it did is undone

    def rollback(self, connection: Connection) -> None:
        binding = binding_of(connection)
        if binding is not None:
            binding.ended(connection)


def _refusal(error: BaseException, fence: Fence) -> FencingError:
    """Why the transaction must not be committed: also when nobody could be asked."""
    if isinstance(error, FencingError):
        return error
    return UnverifiableWrite(
        f"whether a write to {fence.name!r} was admitted could not be found out: {error!r}", table=fence.name
    )


def _around(statement: Any, inner: Any) -> Any:
    """The same reading of rows, from another write."""
    outer = statement._generate()
    outer.element = inner
    if (made := plan_of(inner)) is not None:
        outer.__dict__["_fencing_plan"] = made
    return outer
