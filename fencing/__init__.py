"""Leases with monotonic tokens, for work that must not go on when its lock is lost.

The lease half of the package and all errors. Nothing here imports SQLAlchemy.
"""

from fencing.errors import (
    BackendUnavailable,
    ClaimLost,
    ConfigurationError,
    FencingError,
    LeaseError,
    LeaseLost,
    LeaseNotHeld,
    LeaseUnavailable,
    OutcomeUnknown,
    RowMissing,
    StaleToken,
    TokenRegression,
    UnguardedWrite,
    UnverifiableWrite,
    WriteRejected,
    WrongResource,
)
from fencing.events import LoggingObserver
from fencing.lease import Lease, Leases
from fencing.lease_async import AsyncLease, AsyncLeases
from fencing.policies import Policy, Renewal, Wait
from fencing.token import Grant, HeldBy

__all__ = [
    "AsyncLease",
    "AsyncLeases",
    "BackendUnavailable",
    "ClaimLost",
    "ConfigurationError",
    "FencingError",
    "Grant",
    "HeldBy",
    "Lease",
    "LeaseError",
    "LeaseLost",
    "LeaseNotHeld",
    "LeaseUnavailable",
    "Leases",
    "LoggingObserver",
    "OutcomeUnknown",
    "Policy",
    "Renewal",
    "RowMissing",
    "StaleToken",
    "TokenRegression",
    "UnguardedWrite",
    "UnverifiableWrite",
    "Wait",
    "WriteRejected",
    "WrongResource",
]
