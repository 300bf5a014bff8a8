"""The ends of a guarded transaction: whether it may begin and commit, and what a failure of it means."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, TwoPhaseTransaction
from sqlalchemy.exc import SQLAlchemyError

from fencing.errors import ConfigurationError, FencingError, OutcomeUnknown, StaleToken
from fencing.events import CommitUnknown
from fencing.sql.binding import Binding, Guard, mark
from fencing.sql.plan import plan_of
from fencing.sql.verdict import Asker, refused_row, stale

_COMMITTING = "_fencing_committing"
BEGINS = "_fencing_begins"
TWO_PHASE = (
    "two-phase commit is refused under a guard: a prepared transaction outlives its holder and keeps the next one "
    "out. Use one transaction for each database"
)
SERIALIZATION_FAILURE = "40001"


def may_begin(connection: Connection, binding: Binding, guard: Guard | None = None) -> None:
    """A transaction begins: under a guard it must be one, and ends under that guard."""
    connection.__dict__.pop(_COMMITTING, None)
    connection.__dict__.pop(BEGINS, None)
    guard = guard or binding.guard()
    if guard is None:
        return
    if isinstance(connection.get_transaction(), TwoPhaseTransaction):
        raise ConfigurationError(TWO_PHASE)
    if _autocommits(connection):
        raise ConfigurationError(
            "AUTOCOMMIT is refused under a guard: what a statement did before it was found stale could not be "
            "taken back. Use a transaction"
        )
    if connection.dialect.name == "sqlite":
        connection.__dict__[BEGINS] = True
    binding.linger(connection, guard)


def begin_for_real(connection: Connection, statement: str) -> None:
    """Before the first statement of a guarded transaction on SQLite.

    Safe because it is a transaction from here on: by itself the driver begins one only at the first write, and a
    savepoint before that would commit when it is released.
    """
    if statement.lstrip()[:5].upper() != "BEGIN":
        pooled = connection.connection
        if not getattr(pooled.driver_connection, "in_transaction", True):
            cursor = pooled.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            cursor.close()
    # Only now: when the database was busy, the next statement must begin it.
    connection.__dict__.pop(BEGINS, None)


def _autocommits(connection: Connection) -> bool:
    dialect = connection.dialect
    level = connection.get_execution_options().get("isolation_level")
    level = level or getattr(dialect, "_on_connect_isolation_level", None)
    if level is not None and level.upper() == "AUTOCOMMIT":
        return True
    if dialect.name == "sqlite":  # we begin it ourselves, whatever the driver does
        return False
    driver = connection.connection.dbapi_connection
    try:
        return bool(driver is not None and dialect.detect_autocommit_setting(driver))
    except (NotImplementedError, AttributeError):
        return False


def may_commit(connection: Connection, binding: Binding) -> None:
    """A commit is about to be sent: not when a write of the transaction was refused, nor without the lease."""
    guard = binding.guard(connection)
    refusal = binding.refusal(connection)
    if guard is not None and refusal is None:
        try:
            guard.check()
        except FencingError as error:
            refusal = error
    binding.ended(connection)
    if refusal is not None:
        # Safe because it is rolled back here: SQLAlchemy takes the transaction for ended when this raises,
        # and what the connection does next would be committed together with it.
        try:
            connection.dialect.do_rollback(connection.connection)
        except Exception:  # noqa: BLE001  then it is not used again, which ends it too
            connection.invalidate()
        raise refusal
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
    execution = context.execution_context
    answered = isinstance(original, context.dialect.loaded_dbapi.Error)
    if answered and execution is not None and not execution.executemany:
        binding.pending.pop(connection, None)  # the database refused it whole
    guard = binding.guard(connection)
    if guard is not None and state_of(original) == SERIALIZATION_FAILURE and context.execution_context:
        hidden = _hidden(context, guard)
        if hidden is not None:
            mark(connection, guard, hidden.table or "", "unknown", hidden)
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
    except (SQLAlchemyError, FencingError, OSError):
        return None
    finally:
        apart.dispose()
    if row is None:
        return None
    return stale(made.fence, guard, row, note=" (the database called it a serialization failure)")
