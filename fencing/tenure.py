"""One lease while it lasts, as plain values: which state it is in, and when it next wants attention.

Every change of state is in one table.

::

    HELD ──renewed──▶ HELD
    HELD ──carried on──▶ CONTINUED
    HELD ──left──▶ LEFT
    HELD ──releasing──▶ RELEASING
    HELD ──expired, superseded, abandoned, unknown──▶ LOST

    CONTINUED ──renewed──▶ HELD
    CONTINUED ──left──▶ LEFT
    CONTINUED ──superseded, unknown──▶ LOST

    RELEASING ──released──▶ RELEASED
    RELEASING ──kept──▶ HELD                (the release did not arrive)
    RELEASING ──expired, superseded, unknown──▶ LOST

LOST is sticky, and RELEASED and LEFT are ends: whatever comes later comes too late and changes nothing. So a
renewal that was under way when the lease was released cannot make it look lost, and the other way round.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

from fencing.errors import LeaseLost, LossReason
from fencing.policies import Renewal


class State(StrEnum):
    HELD = "held"
    CONTINUED = "continued"
    """Renewal failed and the policy is to go on: the ledger alone decides."""
    RELEASING = "releasing"
    RELEASED = "released"
    LEFT = "left"
    """The work is done and the lease is left to expire."""
    LOST = "lost"


class Signal(StrEnum):
    RENEWED = "renewed"
    CARRIED_ON = "carried on"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    ABANDONED = "abandoned"
    UNKNOWN = "unknown"
    RELEASING = "releasing"
    RELEASED = "released"
    KEPT = "kept"
    LEFT = "left"


TRANSITIONS: dict[State, dict[Signal, State]] = {
    State.HELD: {
        Signal.RENEWED: State.HELD,
        Signal.CARRIED_ON: State.CONTINUED,
        Signal.EXPIRED: State.LOST,
        Signal.SUPERSEDED: State.LOST,
        Signal.ABANDONED: State.LOST,
        Signal.UNKNOWN: State.LOST,
        Signal.RELEASING: State.RELEASING,
        Signal.LEFT: State.LEFT,
    },
    State.RELEASING: {
        Signal.RELEASED: State.RELEASED,
        Signal.KEPT: State.HELD,
        Signal.EXPIRED: State.LOST,
        Signal.SUPERSEDED: State.LOST,
        Signal.UNKNOWN: State.LOST,
    },
    State.CONTINUED: {
        Signal.RENEWED: State.HELD,
        Signal.SUPERSEDED: State.LOST,
        Signal.UNKNOWN: State.LOST,
        Signal.LEFT: State.LEFT,
    },
    State.RELEASED: {},
    State.LEFT: {},
    State.LOST: {},
}

LOSS: dict[LossReason, Signal] = {
    "expired": Signal.EXPIRED,
    "superseded": Signal.SUPERSEDED,
    "abandoned": Signal.ABANDONED,
    "unknown": Signal.UNKNOWN,
}

_WHY: dict[LossReason, str] = {
    "expired": "its time ran out before it was renewed, or the backend forgot it",
    "superseded": "somebody else holds the resource now",
    "abandoned": "renewal failed too often in a row",
    "unknown": "this process is a fork of the holder's, or an answer was lost",
}


class Tenure:
    """One lease while it lasts, as plain values: what its clock says and which state it is in.

    Times are seconds of the clock that the caller reads; nothing here does.
    """

    __slots__ = (
        "_crossed",
        "_ends",
        "_flights",
        "_sticky",
        "_unsure",
        "acquired_at",
        "failures",
        "max_hold_told",
        "overdue",
        "since",
        "state",
        "ttl",
    )

    def __init__(self, ttl: float, since: float) -> None:
        self.ttl = ttl
        self.acquired_at = since
        self.since = since
        self.failures = 0
        self.state = State.HELD
        self.max_hold_told = False
        self.overdue = False  # to be renewed at once
        self._ends = since + ttl  # as confirmed by the last answer
        self._unsure = inf  # when it ends if a request took effect whose answer is not known
        self._flights = 0  # requests under way
        self._crossed = False  # two of them were, at once
        self._sticky: LeaseLost | None = None

    @property
    def deadline(self) -> float:
        """When it ends at the earliest, whichever of the requests under way takes effect last."""
        return min(self._ends, self._unsure)

    def over(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self._ends or now >= self._unsure

    @property
    def window(self) -> float:
        """For how long it lasts from the last success: its TTL, but for a shorter one that may have arrived."""
        return self.deadline - self.since

    @property
    def lost(self) -> LeaseLost | None:
        return self._sticky

    def signal(self, signal: Signal) -> bool:
        """Move as the table says; False when it comes too late."""
        after = TRANSITIONS[self.state].get(signal)
        if after is None:
            return False
        self.state = after
        return True

    def asked(self, sent_at: float, ttl: float) -> None:
        """A renewal is under way: from now on it may be what the backend goes by."""
        self._flights += 1
        self._crossed = self._crossed or self._flights > 1
        self._unsure = min(self._unsure, sent_at + ttl)

    def answered(self) -> bool:
        """A renewal is not under way any more; whether it crossed another, so that nobody knows which came last."""
        crossed = self._crossed
        self._flights = max(self._flights - 1, 0)
        if self._flights == 0:
            self._crossed = False
        return crossed

    def renewed(self, sent_at: float, ttl: float | None = None) -> bool:
        """A renewal sent at `sent_at` succeeded; `ttl` when it changed the TTL."""
        crossed = self.answered()
        if not self.signal(Signal.RENEWED):
            return False
        if ttl is not None:
            self.ttl = ttl
        self.failures = 0
        self.since = max(self.since, sent_at)
        self.overdue = crossed and self._flights == 0
        if not crossed:
            self._ends, self._unsure = self.since + self.ttl, inf
        return True

    def failed(self, renewal: Renewal) -> bool:
        """A renewal failed; True when that was one too many in a row."""
        self.answered()
        self.failures += 1
        self.overdue = False
        return self.failures >= renewal.failures

    def lose(self, name: str, reason: LossReason, text: str | None = None) -> bool:
        """Lose it for `reason`; False when it was over already."""
        if not self.signal(LOSS[reason]):
            return False
        text = text or f"the lease on {name!r} is lost: {_WHY[reason]}"
        self._sticky = LeaseLost(text, resource=name, reason=reason)
        return True

    def next_at(self, renewal: Renewal | None) -> tuple[float, bool]:
        """When this lease next wants attention, and whether that is to be renewed (else: it runs out then)."""
        if renewal is not None:
            due = self.since + (0.0 if self.overdue else renewal.due(self.window, self.failures))
            allowed = renewal.max_hold is None or due - self.acquired_at < renewal.max_hold
            if allowed and due < self.deadline:
                return due, True
        return self.deadline, False
