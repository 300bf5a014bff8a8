"""What an application uses: `guarded`, `unguarded`, `using`, `FencedSession`. The same for sync and async."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, overload

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencing.errors import ConfigurationError
from fencing.sql.binding import Binding, Guard, Holding, Pass, current
from fencing.sql.commit import TWO_PHASE, may_begin
from fencing.sql.engine import hooks_of
from fencing.sql.targets import (
    HERE,
    attach,
    binding_for,
    connections_of,
    guest_comes,
    inner,
    refuse_stale_reads,
    sync_of,
)
from fencing.token import Grant

T = TypeVar("T", bound=Session | AsyncSession | Connection | AsyncConnection)
S = TypeVar("S", bound=Session)
A = TypeVar("A", bound=AsyncSession)

_LAST = "fencing_last"


class FencedSession(Session):
    """A session whose transactions are guarded by the lease of `using`, where there is one.

    For code in which passing the lease is unwieldy. An explicit `guarded` comes first.

    Example::

        Sessions = sessionmaker(engine, class_=FencedSession)
        AsyncSessions = async_sessionmaker(async_engine, sync_session_class=FencedSession)
    """


@contextmanager
def using(lease: Holding | Grant) -> Iterator[None]:
    """Make the lease the one that every `FencedSession` of this context is guarded by.

    It counts for transactions that begin inside the block, in this thread or task and those that copy its
    context.

    Example::

        with leases.acquire("invoice:42") as lease, using(lease):
            handle(request)
    """
    Guard(lease)  # says at once when it is no lease
    _watch()
    token = current.set(lease)
    try:
        yield
    finally:
        current.reset(token)


class Guarded(Generic[T]):
    """A context manager, for `with` and (on async targets) `async with`."""

    __slots__ = ("_binding", "_guard", "_opened", "_session", "_target")

    def __init__(self, target: Any, lease: Holding | Grant) -> None:
        self._target = target
        self._guard = Guard(lease)
        self._opened: Any = None

    def __enter__(self) -> T:
        target = self._target
        if not isinstance(target, Session):
            if isinstance(target, async_sessionmaker):
                raise ConfigurationError("an async_sessionmaker is entered by `async with guarded(...)`")
            if isinstance(target, sessionmaker):
                target = self._opened = target()
        try:
            self._enter(sync_of(target))
        except BaseException:
            if self._opened is not None:
                self._opened.close()
            raise
        return cast(T, inner(target))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._opened is not None:
            self._opened.close()

    async def __aenter__(self) -> T:
        target = self._target
        if isinstance(target, async_sessionmaker):
            target = self._opened = target()
        try:
            self._enter(sync_of(target))
        except BaseException:
            if self._opened is not None:
                await self._opened.close()
            raise
        return cast(T, inner(target))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._opened is not None:
            await self._opened.close()

    def _enter(self, session: Session | Connection) -> None:
        """Put the guard in force."""
        guard = self._guard
        if isinstance(session, Session) and session.twophase:
            raise ConfigurationError(TWO_PHASE)
        _watch()
        watched = isinstance(session, Session) or hooks_of(session.engine) is not None
        binding = binding_for(session)
        transaction = session.get_transaction()
        around = binding.in_force(transaction)
        if around is None:
            refuse_stale_reads(session, transaction, watched)
        elif around.same_as(guard):
            guard = self._guard = around
        else:
            raise ConfigurationError(
                f"this session is guarded by a lease on {around.grant.resource!r} already: end its transaction "
                "first, or take one lease on both with acquire_all()"
            )
        guard.check()
        self._session, self._binding = session, binding
        binding.stack.append(guard)
        for connection in connections_of(session, transaction):
            attach(connection, binding)
            may_begin(connection, binding, guard)

    def _leave(self) -> None:
        """Take the guard off; the transaction that is under way keeps it."""
        binding, guard = self._binding, self._guard
        # Not simply the last: blocks of generators may be left in another order.
        for at in range(len(binding.stack) - 1, -1, -1):
            if binding.stack[at] is guard:
                del binding.stack[at]
                break
        transaction = self._session.get_transaction()
        binding.carried = None if transaction is None else (transaction, guard)


@overload
def guarded(target: sessionmaker[S], lease: Holding | Grant) -> Guarded[S]: ...
@overload
def guarded(target: async_sessionmaker[A], lease: Holding | Grant) -> Guarded[A]: ...
@overload
def guarded(target: scoped_session[S], lease: Holding | Grant) -> Guarded[S]: ...
@overload
def guarded(target: async_scoped_session[A], lease: Holding | Grant) -> Guarded[A]: ...
@overload
def guarded(target: T, lease: Holding | Grant) -> Guarded[T]: ...
def guarded(target: Any, lease: Holding | Grant) -> Guarded[Any]:
    """Check every write of the session (or connection) against the lease, inside the `with` block.

    A write that a newer holder has overtaken raises `StaleToken`, and nothing of its transaction can be
    committed. Past the lease's deadline statements and commits raise `LeaseLost` and are not sent. A transaction
    that begins in the block ends under the guard, also when you leave the block first.

    Takes a `Session`, `AsyncSession`, `Connection`, `AsyncConnection` or `scoped_session`; a `sessionmaker` is
    asked for a session, which is closed at the end. On entry it refuses a session that has pending changes or whose
    transaction has talked to the database, and expires what was loaded: that was read before the lease was held,
    and no token can see it. The same lease again does nothing; another one is a `ConfigurationError` (use
    `acquire_all`). AUTOCOMMIT and two-phase commit are refused. An engine that lacks the guard gets it (`install`),
    but call that yourself next to `create_engine`: until somebody does, nothing is refused on it.

    Example::

        with leases.acquire("invoice:42") as lease:
            with Session(engine) as session, guarded(session, lease):
                session.get(Invoice, 42).state = "paid"
                session.commit()
    """
    return Guarded(target, lease)


@contextmanager
def unguarded(target: Any, *, reason: str) -> Iterator[None]:
    """Let writes to fenced tables through inside the block, without comparing or stamping: told and counted.

    For a backfill or a repair. `reason` goes to the observers and the log.

    Example::

        with unguarded(session, reason="backfill 2026-11"):
            session.execute(update(Invoice).values(currency="EUR"))
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ConfigurationError("unguarded() wants a reason: it is what stands in the log")
    _watch()
    session = sync_of(target)
    binding = binding_for(session)
    for connection in connections_of(session, session.get_transaction()):
        attach(connection, binding)
    step = Pass(reason)
    binding.stack.append(step)
    try:
        yield
    finally:
        binding.stack.remove(step)


# Sessions tell when they begin and commit.


def _watch() -> None:
    global _watching
    if not _watching:
        with _WATCHING:
            if not _watching:
                event.listen(Session, "after_begin", _after_begin)
                event.listen(Session, "before_commit", _before_commit)
                _watching = True  # last: who finds it set may rely on it


_watching = False
_WATCHING = threading.Lock()


def _after_begin(session: Session, transaction: Any, connection: Connection) -> None:
    binding: Binding | None = session.info.get(HERE)
    guard = None if binding is None else binding.in_force(session.get_transaction())
    if guard is None and isinstance(session, FencedSession):
        binding = binding_for(session)
        guard = _picked_up(session)
    if binding is None or (guard is None and not binding.stack):
        return
    guest_comes(session, transaction, connection)
    if guard is not None and session.twophase:
        raise ConfigurationError(TWO_PHASE)
    attach(connection, binding)
    may_begin(connection, binding, guard)


def _picked_up(session: FencedSession) -> Guard | None:
    """The guard for a transaction that begins now, by the lease of this context if there is one."""
    lease = current.get()
    guard = None if lease is None else Guard(lease)
    before, session.info[_LAST] = session.info.get(_LAST), guard
    if guard is None or (before is not None and before.same_as(guard)) or not session.identity_map:
        return guard
    if session.dirty or session.deleted:
        raise ConfigurationError(
            "this session has pending changes of rows that were read before the lease was held: begin with a "
            "new session, or query again inside using()"
        )
    session.expire_all()
    return guard


def _before_commit(session: Session) -> None:
    """Before any of several databases commits: all may, or none does."""
    binding: Binding | None = session.info.get(HERE)
    if binding is None or session.in_nested_transaction():
        return
    for connection in (*binding.rejected, *binding.pending):
        refusal = binding.refusal(connection)
        if refusal is not None:
            raise refusal


def guard_of(session: Session, lease: Holding | Grant | None) -> Holding | Grant:
    """The grant that the session's writes are checked against; the lease's when it is not guarded now."""
    binding: Binding | None = session.info.get(HERE)
    guard = None if binding is None else binding.in_force(session.get_transaction())
    if guard is not None:
        return guard.grant
    if lease is None:
        raise ConfigurationError("this session is not guarded: give a lease, or enter guarded() first")
    return Guard(lease).grant
