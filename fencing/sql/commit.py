"""The ends of a guarded transaction: whether it may begin and commit, and what a failure of it means."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from fencing.errors import ConfigurationError, FencingError, OutcomeUnknown, StaleToken
from fencing.events import CommitUnknown
from fencing.sql.binding import Binding, Guard
from fencing.sql.plan import plan_of
from fencing.sql.verdict import Asker, refused_row, stale

_COMMITTING = "_fencing_committing"
SERIALIZATION_FAILURE = "40001"


def may_begin(connection: Connection, binding: Binding, guard: Guard | None = None) -> None:
    """A transaction begins: under a guard it must be one, and ends under that guard."""
    connection.__dict__.pop(_COMMITTING, None)
    guard = guard or binding.guard()
    if guard is None:
        return
    if _autocommits(connection):
        raise ConfigurationError(
            "AUTOCOMMIT is refused under a guard: what a statement did before it was found stale could not be "
            "taken back. Use a transaction"
        )
    if connection.dialect.name == "sqlite" and not _under_way(connection):
        # Safe because the transaction is a real one from its first statement on: by itself the driver begins
        # one only at the first write, and a savepoint before that would commit when it is released.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    binding.linger(connection, guard)


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _under_way(connection: Connection) -> bool:
    """Whether SQLite itself is in a transaction."""
    return bool(getattr(_driver(connection), "in_transaction", True))


def _autocommits(connection: Connection) -> bool:
    options = connection.get_execution_options()
    if str(options.get("isolation_level", "")).upper() == "AUTOCOMMIT":
        return True
    driver = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        # Without the driver's own transactions somebody else must have begun this one.
        return getattr(_driver(connection), "isolation_level", "") is None and not _under_way(connection)
    try:
        return bool(driver is not None and connection.dialect.detect_autocommit_setting(driver))
    except (NotImplementedError, AttributeError):
        return False


def may_commit(connection: Connection, binding: Binding) -> None:
    """A commit is about to be sent: not when a write of the transaction was refused, nor without the lease."""
    guard = binding.guard(connection)
    refusal: FencingError | None = binding.rejected.get(connection)
    if guard is not None and refusal is None:
        try:
            guard.check()
        except FencingError as error:
            refusal = error
    binding.ended(connection)
    if refusal is not None:
        # Safe because it is rolled back here: SQLAlchemy takes the transaction for ended when this raises,
        # and what the connection does next would be committed together with it.
        connection.dialect.do_rollback(connection.connection)
        raise refusal.with_traceback(None)
    if guard is not None:
        connection.__dict__[_COMMITTING] = guard


def failed(context: Any, binding: Binding) -> None:
    """The driver raised: say so when it means more than the driver knows."""
    connection, original = context.connection, context.original_exception
    if context.statement is None:
        guard = connection.__dict__.pop(_COMMITTING, None)
        if guard is not None and _undecided(context, original):
            guard.tell(CommitUnknown, error=str(original))
            raise OutcomeUnknown(
                f"the commit was sent and its answer was lost ({original}): nobody here knows whether it "
                "happened. Read what was written in a new transaction before you write again",
                resource=guard.grant.resource,
                token=guard.grant.token,
                holder=guard.grant.holder,
            )
        return
    guard = binding.guard(connection)
    if guard is not None and state_of(original) == SERIALIZATION_FAILURE and context.execution_context:
        hidden = _hidden(context, guard)
        if hidden is not None:
            binding.rejected.setdefault(connection, hidden)
            raise hidden


def state_of(error: BaseException) -> str | None:
    """The SQLSTATE that the server gave, if it gave one."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None


def _undecided(context: Any, error: BaseException) -> bool:
    """Whether a failed commit may have happened all the same.

    An answer of the server is one, unless it says that the server itself, or the line to it, is going away.
    """
    if not isinstance(error, Exception):
        return False  # cancelled or interrupted: that is what the caller must see
    state = state_of(error)
    if state is not None:
        return state[:2] in ("08", "57", "58") or state == "40003"
    if context.dialect.name == "sqlite":
        return getattr(error, "sqlite_errorname", "") not in ("SQLITE_BUSY", "SQLITE_LOCKED", "") and not str(
            getattr(error, "sqlite_errorname", "")
        ).startswith("SQLITE_CONSTRAINT")
    if context.dialect.name in ("mysql", "mariadb"):
        return bool(context.is_disconnect)
    return True


def _hidden(context: Any, guard: Guard) -> StaleToken | None:
    """The stale token behind a serialization failure, looked for on a connection of its own.

    At REPEATABLE READ and above the database says that a row was changed, not by whom, and the transaction can
    read no more. When nobody can be asked the failure stays what it is; trying again tells.
    """
    execution = context.execution_context
    made = plan_of(execution.invoked_statement)
    if made is None:
        return None
    engine = context.connection.engine
    apart = Engine(engine.pool.recreate(), engine.dialect, engine.url)
    try:
        with apart.connect() as connection:
            asker = Asker(connection, guard, execution.execution_options)
            row = refused_row(asker, made, execution.compiled_parameters)
    except DBAPIError:
        return None
    finally:
        apart.dispose()
    if row is None:
        return None
    return stale(made.fence, guard, row, note=" (the database called it a serialization failure)")
