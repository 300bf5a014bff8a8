"""What ties a grant to a session or connection, and what a transaction remembers of its refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from sqlalchemy import Connection

from fencing.errors import ConfigurationError, FencingError, StaleToken, UnverifiableWrite, WrongResource
from fencing.events import LeaseEvent, Observers, WriteRefused
from fencing.sql.fence import Fence
from fencing.token import Grant


class Holding(Protocol):
    """What the SQL half knows of a lease: a grant that is watched."""

    @property
    def namespace(self) -> str: ...

    @property
    def resource(self) -> str: ...

    @property
    def resources(self) -> tuple[str, ...]: ...

    @property
    def holder(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def label(self) -> str: ...

    @property
    def observers(self) -> Observers: ...

    def check(self) -> None:
        """Raise unless it is held, as far as this process knows."""


def _trust() -> None:
    """A grant that travelled here has no clock: the database alone decides."""


_NOBODY = Observers(())


class Guard:
    """A lease, ready to be compared with rows."""

    __slots__ = ("_dashed", "check", "grant", "observers", "token")

    def __init__(self, lease: Holding | Grant) -> None:
        self.grant = lease
        if isinstance(lease, Grant):
            self.check: Callable[[], None] = _trust
            self.observers = _NOBODY
        else:
            try:
                self.check = lease.check
                self.observers = lease.observers
            except AttributeError:
                raise ConfigurationError(
                    f"guarded() takes a lease (or a grant), not {lease!r}"
                    + (": await it first" if hasattr(lease, "__await__") else "")
                ) from None
        self.token = lease.token
        self._dashed: str | None = None

    def same_as(self, other: Guard) -> bool:
        return self.token == other.token and self.grant.holder == other.grant.holder

    def holder(self, fence: Fence) -> str:
        """The holder as it is sent to this table."""
        if not fence.dashed:
            return self.grant.holder
        if self._dashed is None:
            plain = self.grant.holder
            self._dashed = f"{plain[:8]}-{plain[8:12]}-{plain[12:16]}-{plain[16:20]}-{plain[20:]}"
        return self._dashed

    def tell(self, kind: type[LeaseEvent], **what: Any) -> None:
        if kind in self.observers.wanted:
            grant = self.grant
            self.observers(
                kind(
                    namespace=grant.namespace,
                    resource=", ".join(grant.resources),
                    holder=grant.holder,
                    token=grant.token,
                    label=grant.label,
                    **what,
                )
            )


class Pass:
    """The explicit way out: writes are let through, told and counted."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Binding:
    """The guards of one session or connection, the innermost last.

    A transaction that began under a guard ends under it: when the `with` block is left before the commit, the
    guard stays with the transaction and its connections until they commit or roll back.
    """

    __slots__ = ("_lingering", "carried", "pending", "rejected", "stack")

    def __init__(self) -> None:
        self.stack: list[Guard | Pass] = []
        self._lingering: dict[Connection, Guard] = {}
        self.carried: tuple[object, Guard] | None = None
        """A session's transaction that was under way when the block was left, and its guard."""
        self.rejected: dict[Connection, FencingError] = {}
        """Transactions in which a write was refused: nothing of them may be committed."""
        self.pending: dict[Connection, str] = {}
        """The table of a write that was sent and not judged yet: refused until it is."""

    def mode(self, connection: Connection) -> Guard | Pass | None:
        if self.stack:
            return self.stack[-1]
        return self._lingering.get(connection)

    def guard(self, connection: Connection | None = None) -> Guard | None:
        """The guard in force, looking through a way out."""
        for each in reversed(self.stack):
            if isinstance(each, Guard):
                return each
        return None if connection is None else self._lingering.get(connection)

    def linger(self, connection: Connection, guard: Guard) -> None:
        """This transaction ends under the guard, whatever happens to the block."""
        self._lingering[connection] = guard

    def in_force(self, transaction: object) -> Guard | None:
        """The guard of the block, or of the present transaction of the session when the block is left."""
        if self.stack and (guard := self.guard()) is not None:
            return guard
        if self._lingering:
            return next(iter(self._lingering.values()))
        if self.carried is not None and self.carried[0] is transaction:
            return self.carried[1]
        return None

    def refusal(self, connection: Connection) -> FencingError | None:
        """Why the connection's transaction must not be committed, or None."""
        if connection in self.rejected:
            return self.rejected[connection]
        table = self.pending.get(connection)
        if table is None:
            return None
        return UnverifiableWrite(
            f"a write to {table!r} was sent and failed before anybody could tell what it did", table=table
        )

    def lingers(self, connection: Connection) -> bool:
        """Whether the connection's transaction began under a guard."""
        return connection in self._lingering

    def let_go(self) -> None:
        """The session's transaction is over, though that of a connection which is not its own may not be."""
        self._lingering.clear()

    def ended(self, connection: Connection) -> None:
        """The connection's transaction is over."""
        self._lingering.pop(connection, None)
        self.rejected.pop(connection, None)
        self.pending.pop(connection, None)


current: ContextVar[Holding | Grant | None] = ContextVar("fencing_current", default=None)
"""The lease that sessions which look for one are guarded by, in this thread or task."""

_HERE = "_fencing_binding"
_SPOKE = "_fencing_spoke"


def binding_of(connection: Connection) -> Binding | None:
    return connection.__dict__.get(_HERE)


def unverified(connection: Connection, table: str | None) -> None:
    """A write to this table is under way and not judged yet; None: it is, or never happened."""
    binding = connection.__dict__[_HERE]
    if table is None:
        binding.pending.pop(connection, None)
    else:
        binding.pending[connection] = table


def bind(connection: Connection, binding: Binding) -> None:
    # An attribute and no execution option: a statement could replace that.
    connection.__dict__[_HERE] = binding


def spoke(connection: Connection) -> bool:
    """Whether the present transaction has talked to the database, while somebody watched."""
    transaction = connection.get_transaction()
    return transaction is not None and connection.__dict__.get(_SPOKE) is transaction


def speaks(connection: Connection) -> None:
    connection.__dict__[_SPOKE] = connection.get_transaction()


def mode_of(connection: Connection) -> Guard | Pass | None:
    """The guard of the connection, or its way out, or None."""
    binding = binding_of(connection)
    return None if binding is None else binding.mode(connection)


_REASONS: dict[type[FencingError], str] = {
    StaleToken: "stale",
    WrongResource: "wrong_resource",
    UnverifiableWrite: "unverifiable",
}


def mark(connection: Connection, guard: Guard, table: str, verb: str, error: FencingError) -> None:
    """Tell the observers of a refusal, and that nothing of the transaction may be committed."""
    binding = binding_of(connection)
    assert binding is not None
    first = binding.rejected.setdefault(connection, error)
    reason = _REASONS.get(type(error))
    if first is error and reason is not None:
        guard.tell(WriteRefused, table=table, verb=verb, reason=reason, error=str(error))
