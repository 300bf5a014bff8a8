"""What can be guarded: sessions and connections, sync and async, and what ties a binding to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from fencing.errors import ConfigurationError
from fencing.sql.binding import Binding, bind, binding_of, spoke
from fencing.sql.engine import arm

HERE = "fencing"
"""Where a session keeps its binding, in its `info`."""


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
        kept = info[HERE] = binding_for(owner) if isinstance(owner, Connection) else Binding()
    return kept


def connections_of(session: Session | Connection, transaction: Any) -> list[Connection]:
    """The connections that the transaction uses now."""
    if isinstance(session, Connection):
        return [session] if transaction is not None else []
    if transaction is None:
        return []
    return list({id(entry[0]): entry[0] for entry in transaction._connections.values()}.values())


def attach(connection: Connection, binding: Binding) -> None:
    if binding_of(connection) is not binding:
        bind(connection, binding)
        arm(connection)
