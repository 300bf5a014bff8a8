"""What happened, one frozen value a fact. Metrics, logs and traces are observers of these.

Names are stable: they may stand in dashboards and log queries. A resource is in the event for people; an
observer must never make it a metrics label.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, TypeVar

from fencing.errors import ConfigurationError, LossReason
from fencing.token import HeldBy

log = logging.getLogger("fencing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something observable about `resource` in `namespace`."""

    name: ClassVar[str] = "event"
    level: ClassVar[int] = logging.DEBUG
    namespace: str
    resource: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent(Event):
    """An event of one acquisition: who (`holder`, `label`) and which `token`."""

    holder: str
    token: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired(LeaseEvent):
    name: ClassVar[str] = "lease.acquired"
    waited: float
    asked: int
    """How many times the backend was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanFound(LeaseEvent):
    """The lease just taken had ended by expiry, not by release: its holder died or was cut off."""

    name: ClassVar[str] = "lease.orphan_found"
    level: ClassVar[int] = logging.WARNING
    previous: HeldBy
    unowned: float
    """For how many seconds nobody held the resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable(Event):
    name: ClassVar[str] = "lease.unavailable"
    level: ClassVar[int] = logging.INFO
    waited: float
    held_by: HeldBy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(LeaseEvent):
    name: ClassVar[str] = "lease.renewed"
    late: float
    """Seconds between when the renewal was due and when it was sent."""
    took: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(LeaseEvent):
    name: ClassVar[str] = "lease.renewal_failed"
    level: ClassVar[int] = logging.WARNING
    failures: int
    """In a row."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalStopped(LeaseEvent):
    """`max_hold` is reached: the lease runs out at its deadline."""

    name: ClassVar[str] = "lease.renewal_stopped"
    level: ClassVar[int] = logging.WARNING
    held_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(LeaseEvent):
    """Renewal failed too often in a row. Counted under both policies."""

    name: ClassVar[str] = "lease.abandoned"
    level: ClassVar[int] = logging.ERROR
    policy: Literal["fence", "continue"]
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(LeaseEvent):
    name: ClassVar[str] = "lease.lost"
    level: ClassVar[int] = logging.ERROR
    reason: LossReason
    held_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(LeaseEvent):
    """`outcome` is ``unknown`` when the answer to a release was lost and the lease was gone on asking again."""

    name: ClassVar[str] = "lease.released"
    held_for: float
    outcome: Literal["confirmed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFailed(LeaseEvent):
    name: ClassVar[str] = "lease.release_failed"
    level: ClassVar[int] = logging.WARNING
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftToExpire(LeaseEvent):
    """The work is done and the lease stays: held to its TTL, or abandoned and none of ours to delete."""

    name: ClassVar[str] = "lease.left_to_expire"
    held_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHeld(LeaseEvent):
    """A release or renewal was refused: the resource is free, or somebody else's."""

    name: ClassVar[str] = "lease.not_held"
    level: ClassVar[int] = logging.WARNING
    verb: Literal["release", "renew"]
    held_by: HeldBy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack(LeaseEvent):
    """An acquire that did not reach its caller gave back what it had, or may have had, got.

    `token` is 0 when it is not known whether there was one.
    """

    name: ClassVar[str] = "lease.given_back"
    level: ClassVar[int] = logging.INFO
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRegressed(LeaseEvent):
    """The ledger was at or above a fresh token: the backend had gone backwards, and was lifted."""

    name: ClassVar[str] = "token.regressed"
    level: ClassVar[int] = logging.ERROR
    ledger_token: int
    refused_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFailed(Event):
    """A request failed or took too long. `sent`: it may have been carried out all the same."""

    name: ClassVar[str] = "backend.failed"
    level: ClassVar[int] = logging.WARNING
    verb: str
    sent: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySwitched(Event):
    """`resource` is empty: a policy is the namespace's."""

    name: ClassVar[str] = "policy.switched"
    level: ClassVar[int] = logging.WARNING
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFailed(Event):
    """An `on_lost` callback or a policy callable raised; it was caught."""

    name: ClassVar[str] = "callback.failed"
    level: ClassVar[int] = logging.ERROR
    callback: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAdmitted(LeaseEvent):
    """A guarded statement was carried out."""

    name: ClassVar[str] = "write.admitted"
    table: str
    verb: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRefused(LeaseEvent):
    """A guarded write was refused: `reason` is ``stale``, ``wrong_resource`` or ``unverifiable``."""

    name: ClassVar[str] = "write.rejected"
    level: ClassVar[int] = logging.ERROR
    table: str
    verb: str
    reason: Literal["stale", "wrong_resource", "unverifiable"]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnknown(LeaseEvent):
    """The answer to a commit was lost."""

    name: ClassVar[str] = "commit.unknown"
    level: ClassVar[int] = logging.ERROR
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteUnguarded(Event):
    """A write to a fenced table without a guard. `resource` and `namespace` are empty.

    `allowed`: it was let through, for `reason` (given to `unguarded`, or ``warn`` while the guard is rolled
    out, or ``text`` for SQL that the guard cannot read).
    """

    name: ClassVar[str] = "write.unguarded"
    level: ClassVar[int] = logging.WARNING
    table: str
    verb: str
    allowed: bool
    reason: str


EVENTS: tuple[type[Event], ...] = (
    Acquired,
    OrphanFound,
    Unavailable,
    Renewed,
    RenewalFailed,
    RenewalStopped,
    Abandoned,
    Lost,
    Released,
    ReleaseFailed,
    LeftToExpire,
    NotHeld,
    GivenBack,
    TokenRegressed,
    BackendFailed,
    PolicySwitched,
    CallbackFailed,
    WriteAdmitted,
    WriteRefused,
    CommitUnknown,
    WriteUnguarded,
)

Observer = Callable[[Event], None]
"""Receives every event, in the thread in which it happened; must be quick and must not block.

An observer with an attribute `wants` (a collection of event classes) receives only those, and the others are
not even made when nobody wants them.
"""

E = TypeVar("E", bound=Event)


class Observers:
    """A fan-out that never raises into the caller."""

    __slots__ = ("_targets", "wanted")

    def __init__(self, observers: Iterable[Observer]) -> None:
        targets: list[tuple[Observer, frozenset[type[Event]]]] = []
        if callable(observers):
            raise ConfigurationError(f"observers is a list of observers, not the one {observers!r}")
        for observer in observers:
            if not callable(observer):
                raise ConfigurationError(f"an observer is called with each event, and {observer!r} cannot be")
            wants = tuple(getattr(observer, "wants", (Event,)))
            targets.append((observer, frozenset(event for event in EVENTS if issubclass(event, wants))))
        self._targets = tuple(targets)
        self.wanted: frozenset[type[Event]] = frozenset().union(*(wants for _, wants in targets))

    def __call__(self, event: Event) -> None:
        for observer, wants in self._targets:
            if type(event) not in wants:
                continue
            try:
                observer(event)
            except Exception:
                log.exception("observer %r failed on %s", observer, event.name)


class LoggingObserver:
    """Writes events to a logger: ``name key=value ...``, with the event in ``record.fencing_event``.

    Only state changes that someone should see (warnings and worse) by default; `level` DEBUG shows all.
    """

    def __init__(self, logger: logging.Logger = log, *, level: int = logging.WARNING) -> None:
        self._logger = logger
        self.wants = tuple(event for event in EVENTS if event.level >= level)

    def __call__(self, event: Event) -> None:
        if self._logger.isEnabledFor(event.level):
            text = " ".join(f"{key}={value!r}" for key, value in facts(event).items())
            self._logger.log(event.level, "%s %s", event.name, text, extra={"fencing_event": event})


def facts(event: Event) -> Mapping[str, object]:
    """The event's fields, in order, as a mapping."""
    return {field.name: getattr(event, field.name) for field in fields(event)}
