"""Policies: small frozen values that decide. How long to wait, when to renew, when to give up.

A `Policy` is what a class of work (a namespace) wants of its leases. The presets are the lock paths of a
job scheduler; take one, or `dataclasses.replace` what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from fencing.errors import ConfigurationError

MIN_TTL = 0.05
MAX_TTL = 7 * 86400.0

OnFailure = Literal["fence", "continue"]


def ttl_ms(ttl: float) -> int:
    """The TTL as it is sent, in whole milliseconds; refuses what is not a sensible duration."""
    if type(ttl) not in (int, float) or not MIN_TTL <= ttl <= MAX_TTL:
        raise ConfigurationError(f"a ttl is {MIN_TTL} to {MAX_TTL:.0f} seconds, not {ttl!r}")
    return int(ttl * 1000)


def _number(value: object, least: float, what: str, *, above: bool = False) -> None:
    """Refuse what is no finite number of at least (or above) `least`: settings often come from files."""
    good = type(value) in (int, float) and isinstance(value, (int, float)) and value < inf
    if not good or not (value > least if above else value >= least):  # type: ignore[operator]
        raise ConfigurationError(f"{what}, not {value!r}")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigurationError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long an acquire may wait for somebody else's lease to end, and how often it looks.

    `budget` 0 asks once. Each pause is `backoff` seconds, spread by `jitter` (0.5: half to one and a
    half times), and never longer than the present lease still lasts.
    """

    budget: float = 2.0
    backoff: float = 0.025
    jitter: float = 0.5

    def __post_init__(self) -> None:
        _number(self.budget, 0, "a wait budget is a finite number of seconds, 0 or more")
        _number(self.backoff, 0, "a backoff is more than 0 seconds", above=True)
        _number(self.jitter, 0, "jitter is from 0 to 1")
        _require(self.jitter <= 1, f"jitter is from 0 to 1, not {self.jitter!r}")

    def pause(self, *, waited: float, left: float, roll: float) -> float | None:
        """How long to sleep before asking again, or None to give up.

        `left` is what remains of the present lease, `roll` a random number from 0 to 1.
        """
        remaining = self.budget - waited
        if remaining < 1e-6:  # less than a clock can be waited for: the sum of many pauses is not exact
            return None
        spread = self.backoff * (1 + self.jitter * (2 * roll - 1))
        return min(spread, left + 0.001, remaining)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """When a held lease is renewed and what happens when that fails.

    Due at a third of the TTL after the last success; after a failure the next tries are spread up to 7/9
    of it, each bounded, so that `failures` failures in a row are known before 8/9: with ``fence`` the lease
    is abandoned before its deadline. With ``continue`` the work goes on and the ledger alone decides (so a
    ledger is needed). `max_hold` caps for how many seconds renewal may go on at all.
    """

    failures: int = 3
    on_failure: OnFailure = "fence"
    max_hold: float | None = None

    def __post_init__(self) -> None:
        _require(
            type(self.failures) is int and 1 <= self.failures <= 100,
            f"failures is a whole number from 1 to 100, not {self.failures!r}",
        )
        _require(
            self.on_failure in ("fence", "continue"),
            f"on_failure is 'fence' or 'continue', not {self.on_failure!r}",
        )
        if self.max_hold is not None:
            _number(self.max_hold, 0, "max_hold is more than 0 seconds", above=True)

    def due(self, ttl: float, failed: int) -> float:
        """Seconds after the last success at which the next try is due, when `failed` tries failed since."""
        if failed == 0 or self.failures == 1:
            return ttl / 3
        step = ttl * 4 / 9 / (self.failures - 1)
        return ttl / 3 + min(failed, self.failures - 1) * step

    def bound(self, ttl: float) -> float:
        """How long one try may take."""
        gap = ttl * 4 / 9 / max(self.failures - 1, 1)
        return min(2.0, ttl / 9, gap / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a class of work wants of its leases.

    `hold_to_ttl`: neither renewed nor released; expiry rotates ownership (periodic loops). `poll` says how
    often a contender that does not wait comes by; it only enters `takeover_window`.
    """

    ttl: float = 30.0
    wait: Wait = field(default_factory=Wait)
    renewal: Renewal = field(default_factory=Renewal)
    hold_to_ttl: bool = False
    poll: float | None = None

    def __post_init__(self) -> None:
        ttl_ms(self.ttl)
        _require(isinstance(self.wait, Wait), f"wait is a fencing.Wait, not {self.wait!r}")
        _require(isinstance(self.renewal, Renewal), f"renewal is a fencing.Renewal, not {self.renewal!r}")
        if self.poll is not None:
            _number(self.poll, 0, "poll is more than 0 seconds", above=True)

    @property
    def takeover_window(self) -> float:
        """The longest time from the death of a holder to the next one, in seconds."""
        if self.poll is not None:
            return self.ttl + self.poll
        return self.ttl + self.wait.backoff * (1 + self.wait.jitter)


JOB_TRANSITION = Policy(ttl=60.0, renewal=Renewal(failures=3))
"""One state change of one job: 60 s, renewed every 20 s, abandoned and fenced after 3 failures."""

WORKFLOW_RUN = Policy(ttl=30.0, renewal=Renewal(failures=3, on_failure="continue"))
"""A workflow run: 30 s, renewed every 10 s; goes on through an outage, the ledger decides."""

APPROVAL = Policy(ttl=10.0, wait=Wait(budget=2.0, backoff=0.025))
"""A person clicks: 10 s, at most 2 s of waiting in steps of 25 ms."""

SNAPSHOT_WRITER = Policy(ttl=10.0, wait=Wait(budget=0.0), poll=5.0)
"""One writer of many, that comes by every 5 s: 10 s, so the next one writes within about 15 s of a crash."""


def periodic_loop(poll: float = 30.0) -> Policy:
    """A loop that runs every `poll` seconds on each replica and works on one: held for two polls, not released.

    A replica that released at once would let the next one do the same tick again.
    """
    return Policy(ttl=2 * poll, wait=Wait(budget=0.0), hold_to_ttl=True, poll=poll)
