"""What can go wrong, as a tree. Every failure of safety is an exception, never a ``False``.

::

    FencingError
    ├── LeaseError                 .resource
    │   ├── LeaseUnavailable       not obtained in the time allowed         .held_by .retry_after
    │   ├── LeaseLost              held once, not now                       .reason
    │   └── LeaseNotHeld           release or renew by someone who does not hold it
    ├── WriteRejected              .resource .token .holder
    │   ├── StaleToken             a newer holder has claimed or written    .stored_token .stored_holder
    │   └── ClaimLost              the database no longer knows this claim: failed over or restored
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
    """The database refused a write of the holder with `token`."""

    def __init__(self, message: str, *, resource: str, token: int, holder: str) -> None:
        super().__init__(message)
        self.resource = resource
        self.token = token
        self.holder = holder


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
    ) -> None:
        super().__init__(message, resource=resource, token=token, holder=holder)
        self.stored_token = stored_token
        self.stored_holder = stored_holder


class ClaimLost(WriteRejected):
    """The ledger is below this claim, or empty: the database failed over or was restored."""


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
