"""What can go wrong, as a tree. Every failure of safety is an exception, never a ``False``.

::

    FencingError
    ├── LeaseError                 .resource
    │   ├── LeaseUnavailable       not obtained in the time allowed         .held_by .retry_after
    │   ├── LeaseLost              held once, not now                       .reason
    │   └── LeaseNotHeld           release or renew by someone who does not hold it
    ├── WriteRejected              .resource .table .identity .token .holder
    │   ├── StaleToken             a newer holder has claimed or written    .stored_token .stored_holder
    │   ├── ClaimLost              the database no longer knows this claim: failed over or restored
    │   ├── RowMissing             nothing there to compare with
    │   └── WrongResource          the lease is about another resource
    ├── UnguardedWrite             a fenced table, and no guard bound       .table
    ├── UnverifiableWrite          it cannot be told what happened, so it is refused    .table
    ├── OutcomeUnknown             the commit was sent, its answer was lost .resource .token .holder
    ├── TokenRegression            the counter is behind, and could not be healed
    ├── BackendUnavailable         unreachable or too slow                  .sent
    └── ConfigurationError         also a ValueError

All of them pickle, with their attributes, so that they can cross process borders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fencing.token import HeldBy

LossReason = Literal["expired", "superseded", "abandoned", "unknown"]


def _revive(cls: type[FencingError], args: tuple[object, ...], attributes: dict[str, object]) -> FencingError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


class FencingError(Exception):
    """The root: catch this to catch everything the package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__.copy())


class LeaseError(FencingError):
    """Something about the lease on `resource`."""

    def __init__(self, message: str, *, resource: str) -> None:
        super().__init__(message)
        self.resource = resource


class LeaseUnavailable(LeaseError):
    """Somebody else holds the resource, and the time allowed for waiting is over.

    Contention, not a fault: trying again later is sensible, `retry_after` seconds from now at the
    latest the present lease ends unless it is renewed.
    """

    def __init__(
        self, message: str, *, resource: str, held_by: HeldBy | None, retry_after: float | None
    ) -> None:
        super().__init__(message, resource=resource)
        self.held_by = held_by
        self.retry_after = retry_after


class LeaseLost(LeaseError):
    """The lease was held once and is not now. Sticky: the same error at every later use.

    `reason` is ``expired`` (its time ran out), ``superseded`` (somebody else holds the resource),
    ``abandoned`` (renewal failed too often in a row) or ``unknown`` (an answer was lost, or this
    process is a fork of the holder's).
    """

    def __init__(self, message: str, *, resource: str, reason: LossReason) -> None:
        super().__init__(message, resource=resource)
        self.reason = reason


class LeaseNotHeld(LeaseError):
    """A release or a renewal by someone who does not hold the lease. Nothing was changed."""

    def __init__(self, message: str, *, resource: str, held_by: HeldBy | None = None) -> None:
        super().__init__(message, resource=resource)
        self.held_by = held_by


class WriteRejected(FencingError):
    """The database refused a write of the holder with `token`.

    `table` and `identity` (the primary key) say which row; both are None when it was not a row's fence.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str,
        token: int,
        holder: str,
        table: str | None = None,
        identity: tuple[object, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.token = token
        self.holder = holder
        self.table = table
        self.identity = identity


class StaleToken(WriteRejected):
    """A newer holder has claimed or written. Retrying is useless: drop the work."""

    def __init__(
        self,
        message: str,
        *,
        resource: str,
        token: int,
        holder: str,
        stored_token: int,
        stored_holder: str | None,
        table: str | None = None,
        identity: tuple[object, ...] | None = None,
    ) -> None:
        super().__init__(
            message, resource=resource, token=token, holder=holder, table=table, identity=identity
        )
        self.stored_token = stored_token
        self.stored_holder = stored_holder


class ClaimLost(WriteRejected):
    """The ledger is below this claim, or empty: the database failed over or was restored."""


class RowMissing(WriteRejected):
    """There is no such row, so there is nothing to compare with. Not a sign of a newer holder."""


class WrongResource(WriteRejected):
    """The row belongs to another resource than the lease. Nothing was sent, or it is rolled back."""


class UnguardedWrite(FencingError):
    """A write to a fenced table, and no guard bound. Nothing was sent.

    Use `guarded(session, lease)`, or `unguarded(session, reason=...)` when it is meant.
    """

    def __init__(self, message: str, *, table: str) -> None:
        super().__init__(message)
        self.table = table


class UnverifiableWrite(FencingError):
    """A write to a fenced table of which nobody could tell whether the fence admitted it, so it is refused."""

    def __init__(self, message: str, *, table: str) -> None:
        super().__init__(message)
        self.table = table


class OutcomeUnknown(FencingError):
    """The commit was sent and its answer was lost: nobody here knows whether it happened.

    Read what you wrote in a new transaction before you write it again.
    """

    def __init__(self, message: str, *, resource: str, token: int, holder: str) -> None:
        super().__init__(message)
        self.resource = resource
        self.token = token
        self.holder = holder


class TokenRegression(FencingError):
    """Redis issues tokens that the ledger has already passed, and it could not be healed."""

    def __init__(self, message: str, *, resource: str, token: int | None, ledger_token: int | None) -> None:
        super().__init__(message)
        self.resource = resource
        self.token = token
        self.ledger_token = ledger_token


class BackendUnavailable(FencingError):
    """The backend is unreachable or too slow.

    `sent` says whether the request may have reached it: then nobody knows what it did there.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class ConfigurationError(FencingError, ValueError):
    """The call is wrong, or the backend refuses this client. Fix the program or its settings."""
