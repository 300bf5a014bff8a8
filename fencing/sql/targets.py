"""What can be guarded: sessions and connections, sync and async, and what ties a binding to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from fencing.errors import ConfigurationError
from fencing.sql.binding import Binding, bind, binding_of, spoke
from fencing.sql.engine import arm

HERE = "fencing"
"""Where a session keeps its binding, in its `info`."""
_BEFORE = "fencing_before"


def refuse_stale_reads(session: Session | Connection, transaction: Any, watched: bool) -> None:
    """Refuse what was read before the lease was held, and forget what was loaded."""
    if isinstance(session, Connection):
        if transaction is not None and (spoke(session) or not watched):
            known = (
                "" if watched else ", and call install(engine) next to create_engine, so that this is known"
            )
            raise ConfigurationError(
                "this connection's transaction has talked to the database already: what it read was read before "
                f"the lease was held. Enter guarded() first{known}"
            )
        return
    if transaction is not None and connections_of(session, transaction):
        raise ConfigurationError(
            "this session's transaction has talked to the database already: what it read was read before the "
            "lease was held. Enter guarded() before the first query, or commit or roll back first"
        )
    loaded = len(session.identity_map)
    if session.new or (loaded and (session.dirty or session.deleted)):
        raise ConfigurationError(
            "this session has pending changes that were made before the lease was held: enter guarded() first"
        )
    if loaded:
        session.expire_all()


def sync_of(target: Any) -> Session | Connection:
    """The session or connection behind what was given."""
    target = inner(target)
    if isinstance(target, Session | Connection):
        return target
    if isinstance(target, AsyncSession):
        return target.sync_session
    if isinstance(target, AsyncConnection):
        if target.sync_connection is None:
            raise ConfigurationError("this AsyncConnection is not started: await it first")
        return target.sync_connection
    raise ConfigurationError(
        f"guarded() takes a Session, AsyncSession, Connection, AsyncConnection, scoped_session or sessionmaker, "
        f"not {target!r}"
    )


def inner(target: Any) -> Any:
    if isinstance(target, Session) or not isinstance(target, scoped_session | async_scoped_session):
        return target
    return target()


def binding_for(session: Session | Connection) -> Binding:
    """The binding of the session, or of the connection that it was made on; made when there is none."""
    if isinstance(session, Connection):
        there = binding_of(session)
        if there is None:
            there = Binding()
            attach(session, there)
        return there
    info = session.info
    kept: Binding | None = info.get(HERE)
    if kept is None:
        owner = session.bind
        if isinstance(owner, Connection):
            kept = info[HERE] = binding_for(owner)
            event.listen(session, "after_transaction_end", _guest_left)
            event.listen(session, "after_soft_rollback", _guest_rolled_back)
        else:
            kept = info[HERE] = Binding()
    return kept


def connections_of(session: Session | Connection, transaction: Any) -> list[Connection]:
    """The connections that the transaction uses now."""
    if isinstance(session, Connection):
        return [session] if transaction is not None else []
    if transaction is None:
        return []
    return list({id(entry[0]): entry[0] for entry in transaction._connections.values()}.values())


def attach(connection: Connection, binding: Binding) -> None:
    there = binding_of(connection)
    if there is not binding:
        if there is not None and (there.rejected or there.guard(connection) is not None):
            raise ConfigurationError(
                "this connection is guarded by itself: make the session on it, Session(connection), so that both "
                "are under one guard"
            )
        bind(connection, binding)
        arm(connection)


# A session on a connection that is not its own, as in the fixtures of tests, is a guest in its transaction. When the
# guest's own is over, that of the connection goes on; what the guest rolled back to a savepoint is gone all the same.
# What the connection had before he came stays.


def guest_comes(session: Session, transaction: Any, connection: Connection) -> None:
    """Remember what there was, before a transaction of the session's binds the connection."""
    if session.bind is connection and transaction.parent is None:
        binding: Binding = session.info[HERE]
        session.info[_BEFORE] = binding.lingers(connection), connection in binding.rejected


def _guest_left(session: Session, transaction: Any) -> None:
    if transaction.parent is None and not session.info.get(_BEFORE, (False, False))[0]:
        session.info[HERE].let_go()


def _guest_rolled_back(session: Session, transaction: Any) -> None:
    if transaction.parent is None and not session.info.get(_BEFORE, (False, False))[1]:
        session.info[HERE].rejected.pop(session.bind, None)
