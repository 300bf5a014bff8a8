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
    RELEASING ──kept──▶ KEPT                (the release did not arrive: not renewed, may be released again)
    KEPT ──releasing──▶ RELEASING
    KEPT ──renewed──▶ HELD
    KEPT ──expired, superseded, unknown──▶ LOST
    RELEASING ──expired, superseded, unknown──▶ LOST

LOST is sticky, and RELEASED and LEFT are ends: whatever comes later comes too late and changes nothing. So a
renewal that was under way when the lease was released cannot make it look lost, and the other way round.
"""

from __future__ import annotations

from enum import StrEnum

from fencing.errors import LeaseLost, LossReason
from fencing.policies import Renewal


class State(StrEnum):
    HELD = "held"
    CONTINUED = "continued"
    """Renewal failed and the policy is to go on: the ledger alone decides."""
    RELEASING = "releasing"
    KEPT = "kept"
    """It was to be released, and nothing arrived: it runs out, or is released again."""
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
        Signal.KEPT: State.KEPT,
        Signal.EXPIRED: State.LOST,
        Signal.SUPERSEDED: State.LOST,
        Signal.UNKNOWN: State.LOST,
    },
    State.KEPT: {
        Signal.RENEWED: State.HELD,
        Signal.RELEASING: State.RELEASING,
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

    __slots__ = ("_sticky", "acquired_at", "deadline", "failures", "max_hold_told", "since", "state", "ttl")

    def __init__(self, ttl: float, since: float) -> None:
        self.ttl = ttl
        self.acquired_at = since
        self.since = since  # when the last request that succeeded was sent
        self.deadline = since + ttl
        self.failures = 0
        self.state = State.HELD
        self.max_hold_told = False
        self._sticky: LeaseLost | None = None

    @property
    def lost(self) -> LeaseLost | None:
        return self._sticky

    def over(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self.deadline

    def signal(self, signal: Signal) -> bool:
        """Move as the table says; False when it comes too late."""
        after = TRANSITIONS[self.state].get(signal)
        if after is None:
            return False
        self.state = after
        return True

    def renewed(self, sent_at: float, ttl: float | None = None) -> bool:
        """A renewal to `ttl` (or the present one) that was sent at `sent_at` succeeded.

        Safe because a backend never shortens: whichever of several renewals came last there, and however late
        one that was given up arrives, the lease lasts as long as any of those that succeeded was promised.
        """
        if not self.signal(Signal.RENEWED):
            return False
        self.since = max(self.since, sent_at)
        self.deadline = max(self.deadline, sent_at + (self.ttl if ttl is None else ttl))
        self.failures = 0
        return True

    def extended(self, sent_at: float, ttl: float) -> bool:
        """As `renewed`, and the TTL is this from now on, also when it is shorter than what is left."""
        if not self.renewed(sent_at, ttl):
            return False
        self.ttl = ttl
        self.deadline = sent_at + ttl
        return True

    def failed(self, renewal: Renewal) -> bool:
        """A renewal failed; True when that was one too many in a row."""
        self.failures += 1
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
            due = self.since + renewal.due(self.ttl, self.failures)
            allowed = renewal.max_hold is None or due - self.acquired_at < renewal.max_hold
            if allowed and due < self.deadline:
                return due, True
        return self.deadline, False
