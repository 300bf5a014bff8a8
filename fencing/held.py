"""A held lease, without the waiting: what `Lease` and `AsyncLease` have in common.

A grant, a tenure, and what follows when it is renewed, released or lost. Everything here only decides, moves
the tenure and tells; sending is the twins' part.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, NoReturn, Protocol

from fencing.backends.base import Acquire, Done, NotHeld, Release, Renew, Reply, new
from fencing.clock import Clock
from fencing.errors import FencingError, LeaseLost, LeaseNotHeld, LossReason
from fencing.events import (
    Abandoned,
    LeaseEvent,
    LeftToExpire,
    Lost,
    Observers,
    Released,
    ReleaseFailed,
    RenewalFailed,
    RenewalStopped,
    Renewed,
)
from fencing.events import NotHeld as NotHeldEvent
from fencing.flows import Freed, Held
from fencing.gate import Gate, Seat
from fencing.policies import Policy, Renewal, Wait, ttl_ms
from fencing.tenure import Signal, State, Tenure
from fencing.token import Grant, HeldBy

STANDING = (State.HELD, State.CONTINUED, State.KEPT)
"""The states in which the work may go on, as far as this process knows."""


class Order(NamedTuple):
    """One acquire, decided: what to ask for, how long to wait, and how to hold it."""

    command: Acquire
    wait: Wait
    renewal: Renewal | None
    """As given with the call; None: whatever the policy says at the time."""
    hold_to_ttl: bool
    started: float


class Issuer(Protocol):
    """What a lease needs of the `Leases` it came from."""

    clock: Clock
    gate: Gate
    mutex: threading.Lock
    tell: Observers
    life: object
    """Another one in a forked child."""

    def _policy_now(self) -> Policy: ...

    def _look_after(self, lease: Any) -> None:
        """Renew the lease from now on."""

    def _forget(self, lease: Any) -> None:
        """Do not renew the lease any more."""


class LeaseCore:
    """A held lease: renewed in the background, released at the end, told when it is lost."""

    __slots__ = (
        "_born",
        "_command",
        "_early",
        "_hold_to_ttl",
        "_leases",
        "_on_lost",
        "_renewal",
        "_renewed_due",
        "_renewing",
        "_seat",
        "_slot",
        "_tenure",
        "_token",
    )

    def __init__(self, leases: Issuer, order: Order, held: Held, seat: Seat, on_lost: Any) -> None:
        self._leases = leases
        self._born = leases.life
        self._command = order.command
        self._token = held.token
        self._renewal = order.renewal
        self._hold_to_ttl = order.hold_to_ttl
        self._tenure = Tenure(order.command.ttl_ms / 1000, held.since)
        self._seat: Seat | None = seat
        self._on_lost = on_lost
        self._slot = 0.0
        # Earlier than any policy renews it, and than its deadline.
        self._early = held.since + self._tenure.ttl / 4
        self._renewed_due = 0.0
        self._renewing = 0.0

    def __repr__(self) -> str:
        state = self._tenure.state.value
        return f"<{type(self).__name__} {self._command.target.name!r} token={self._token} {state}>"

    @property
    def resource(self) -> str:
        """The resource, or the first of several."""
        return self._command.target.resources[0]

    @property
    def resources(self) -> tuple[str, ...]:
        """All resources that the lease is about."""
        return self._command.target.resources

    @property
    def namespace(self) -> str:
        return self._command.target.namespace

    @property
    def holder(self) -> str:
        """The unique id of this acquisition."""
        return self._command.holder

    @property
    def label(self) -> str:
        """Shown to people, never compared."""
        return self._command.label

    @property
    def token(self) -> int:
        """The monotonic token of this acquisition."""
        return self._token

    @property
    def grant(self) -> Grant:
        """The frozen proof that travels to the database, with the deadline as it is now."""
        command = self._command
        target = command.target
        return Grant(
            target.namespace,
            target.resources,
            command.holder,
            self._token,
            self._tenure.deadline,
            command.label,
        )

    @property
    def observers(self) -> Observers:
        """Who is told what happens to this lease, and to the writes that it guards."""
        return self._leases.tell

    @property
    def ttl(self) -> float:
        return self._tenure.ttl

    @property
    def time_left(self) -> float:
        """Seconds until the deadline unless it is renewed before; 0 when it is over."""
        tenure = self._tenure
        if tenure.state not in (State.HELD, State.KEPT):
            return 0.0
        return max(tenure.deadline - self._leases.clock.now(), 0.0)

    @property
    def lost(self) -> LeaseLost | None:
        """The error that ended the lease, or None. Sticky."""
        self._notice()
        return self._tenure.lost

    @property
    def held(self) -> bool:
        """Whether the lease is, as far as this process knows, held."""
        self._notice()
        return self._tenure.state in STANDING

    def _as_held_by(self, resource: str) -> HeldBy:
        """This lease as another waiter of the process sees it."""
        clock = self._leases.clock
        since = clock.wall() - (clock.now() - self._tenure.acquired_at)
        return HeldBy(resource, self.holder, self._token, self.label, since, self.time_left)

    def check(self) -> None:
        """Raise unless the lease is, as far as this process knows, still held. No round trip.

        Raises `LeaseLost` when it was lost, `LeaseNotHeld` when it was released. Passing proves nothing to
        the database: that is what the token is for.
        """
        tenure, leases = self._tenure, self._leases
        if tenure.state is State.HELD and self._born is leases.life and leases.clock.now() < tenure.deadline:
            return  # the usual case, at every guarded statement
        self._notice()
        if tenure.lost is not None:
            raise tenure.lost.with_traceback(None)  # the same error each time, without its history
        if tenure.state not in STANDING:
            self._raise_released()

    def _raise_released(self) -> NoReturn:
        name = self._command.target.name
        raise LeaseNotHeld(f"the lease on {name!r} is over: it was released", resource=name)

    def _notice(self) -> None:
        """Find the lease lost when its time has run out, or when it is the parent's of this forked process."""
        tenure = self._tenure
        if self._born is not self._leases.life:
            # Without a word to anybody: in the parent it lives on.
            self._seat = None
            tenure.lose(self._command.target.name, "unknown")
        elif tenure.state in (State.HELD, State.KEPT) and tenure.over(self._leases.clock.now()):
            self._past_deadline()

    def _past_deadline(self) -> None:
        renewal = self._current_renewal()
        if self._tenure.state is State.HELD and self._goes_on(renewal):
            self._carry_on(self._tenure.failures)
        else:
            self._lose("expired")

    def _goes_on(self, renewal: Renewal | None) -> bool:
        """Whether the work goes on without the lease; not when it may not be renewed any more anyway."""
        if renewal is None or renewal.on_failure != "continue":
            return False
        return renewal.max_hold is None or self._tenure.next_at(renewal)[1]

    def _current_renewal(self) -> Renewal | None:
        if self._hold_to_ttl:
            return None
        return self._renewal or self._leases._policy_now().renewal

    # For the renewer.

    def _next_due(self) -> tuple[float, float] | None:
        """When it next wants attention, and the grain to which that may be rounded down."""
        tenure = self._tenure
        if tenure.state is not State.HELD:
            return None
        renewal = self._current_renewal()
        at, renews = tenure.next_at(renewal)
        if not renews:
            if renewal is not None and not tenure.max_hold_told and renewal.max_hold is not None:
                tenure.max_hold_told = True
                self._tell(RenewalStopped, held_for=self._held_for())
            return at + 0.002, 0.001  # rounded down it must not be before the deadline
        self._renewed_due = at
        return at, min(max(tenure.ttl / 300, 0.001), 0.1)

    def _attend(self, now: float) -> tuple[Renew, float] | None:
        """What to send to renew it, with its bound; finds it expired when it is."""
        tenure = self._tenure
        if tenure.state is not State.HELD:
            return None
        if tenure.over(now):
            self._past_deadline()
            return None
        renewal = self._current_renewal()
        _, renews = tenure.next_at(renewal)
        if renewal is None or not renews:
            return None
        self._renewing = tenure.ttl
        return self._renew_command(None), renewal.bound(tenure.ttl)

    def _settle(self, answer: Reply | FencingError, sent_at: float, took: float) -> None:
        """Take in how a renewal went."""
        tenure = self._tenure
        if tenure.state is not State.HELD:
            return
        match answer:
            case Done():
                late = max(sent_at - self._renewed_due, 0.0)
                with self._leases.mutex:
                    renewed = tenure.renewed(sent_at, self._renewing)
                if renewed and Renewed in self._leases.tell.wanted:
                    self._tell(Renewed, late=late, took=took)
            case NotHeld():
                self._not_held("renew", answer)
            case _:
                self._renewal_failed(answer)

    def _renew_command(self, ttl: float | None) -> Renew:
        command = self._command
        whole = command.ttl_ms if ttl is None else ttl_ms(ttl)
        return Renew(command.target, command.holder, whole, not self._hold_to_ttl)

    def _renewal_failed(self, error: object) -> None:
        tenure = self._tenure
        renewal = self._current_renewal() or Renewal()
        too_many = tenure.failed(renewal)
        self._tell(RenewalFailed, failures=tenure.failures, error=str(error))
        if not too_many:
            return
        if renewal.on_failure == "continue":
            self._carry_on(tenure.failures)
        else:
            self._tell(Abandoned, policy="fence", failures=tenure.failures)
            self._lose("abandoned")

    def _carry_on(self, failures: int) -> None:
        if self._signal(Signal.CARRIED_ON):
            self._leases._forget(self)
            self._tell(Abandoned, policy="continue", failures=failures)

    def _not_held(self, verb: str, reply: NotHeld) -> None:
        """The backend says that somebody else holds it, or nobody."""
        self._tell(NotHeldEvent, verb=verb, held_by=reply.held_by)
        gone = reply.held_by is None
        if gone and self._goes_on(self._current_renewal()):
            self._carry_on(self._tenure.failures)
        else:
            self._lose("expired" if gone else "superseded")

    def _lose(self, reason: LossReason) -> None:
        leases = self._leases
        with leases.mutex:
            if not self._tenure.lose(self._command.target.name, reason):
                return
        leases._forget(self)
        self._leave_gate()
        self._tell(Lost, reason=reason, held_for=self._held_for())
        self._announce_loss()

    def _signal(self, signal: Signal) -> bool:
        with self._leases.mutex:  # the renewer, and any thread, may end it at this moment
            return self._tenure.signal(signal)

    def _announce_loss(self) -> None:
        raise NotImplementedError

    def _leave_gate(self) -> None:
        seat = self._seat
        if seat is not None:
            self._seat = seat.lease = None
            for resource in self._command.target.resources:
                self._leases.gate.leave(resource, seat)

    def _held_for(self) -> float:
        return self._leases.clock.now() - self._tenure.acquired_at

    def _tell(self, kind: type[LeaseEvent], **what: Any) -> None:
        leases = self._leases
        if kind in leases.tell.wanted:
            command = self._command
            leases.tell(
                kind(
                    namespace=command.target.namespace,
                    resource=command.target.name,
                    holder=command.holder,
                    token=self._token,
                    label=command.label,
                    **what,
                )
            )

    # For release.

    def _begin_release(self) -> Release | None:
        """The command that frees the lease, which from now on is not renewed; None when it is left alone.

        Raises `LeaseNotHeld` when it was released before, `LeaseLost` when it was abandoned: then somebody
        else may hold it, and it is none of ours to delete.
        """
        if self._born is not self._leases.life:
            self._notice()
        tenure = self._tenure
        lost = tenure.lost
        if lost is not None and lost.reason in ("abandoned", "unknown"):
            raise lost.with_traceback(None)
        if tenure.state is State.CONTINUED:
            self._leave()
            return None
        if lost is None and not self._signal(Signal.RELEASING):
            self._raise_released()
        self._leases._forget(self)
        command = self._command
        return new(Release, (command.target, command.holder))

    def _end_release(self, reply: Done | NotHeld | None) -> None:
        """Take in what came of a release; raises unless it is confirmed."""
        self._leave_gate()
        if Released in self._leases.tell.wanted and not isinstance(reply, NotHeld):
            outcome = "unknown" if reply is None else "confirmed"
            self._tell(Released, held_for=self._held_for(), outcome=outcome)
        if type(reply) is Done:
            self._tenure.signal(Signal.RELEASED)  # from RELEASING nobody else moves it
            return
        name = self._command.target.name
        if isinstance(reply, NotHeld):
            self._tell(NotHeldEvent, verb="release", held_by=reply.held_by)
            self._lose("expired" if reply.held_by is None else "superseded")
            now_held = "nobody" if reply.held_by is None else reply.held_by.label or reply.held_by.holder
            raise LeaseNotHeld(
                f"{name!r} was not released: this lease (token {self._token}) had ended before, and "
                f"{now_held} holds the resource now. Nothing was deleted",
                resource=name,
                held_by=reply.held_by,
            )
        self._tenure.lose(
            name,
            "unknown",
            f"the answer to the release of {name!r} was lost, and on asking again the lease was gone: "
            "most likely it was released, but it may have run out before",
        )
        raise self._tenure.lost or AssertionError("it was over before")

    def _freed(self, freed: Freed) -> None:
        """Take in what came of a release that took more than one request."""
        if freed.stopped is None:
            self._end_release(freed.reply)
            return
        try:
            self._end_release(freed.reply)
        except FencingError:
            pass  # told as an event; what stopped us is the news
        raise freed.stopped

    def _release_failed(self, error: BaseException) -> None:
        """It is not renewed any more and ends at its deadline at the latest; sooner, if a request arrived."""
        self._leave_gate()
        if getattr(error, "sent", True):
            name = self._command.target.name
            why = f"nobody knows whether the lease on {name!r} was released: {error}"
            self._tenure.lose(name, "unknown", why)
        else:
            self._signal(Signal.KEPT)
        self._tell(ReleaseFailed, error=str(error) or type(error).__name__)

    def _leaves(self) -> bool:
        """At the end of a `with` block: whether there is nothing to send."""
        state = self._tenure.state
        if self._born is not self._leases.life:
            return True
        if state is State.HELD and not self._hold_to_ttl:
            return False
        if state is State.HELD or state is State.CONTINUED:
            self._leave()
        return True

    def _leave(self) -> None:
        if self._signal(Signal.LEFT):
            self._leases._forget(self)
            self._leave_gate()
            self._tell(LeftToExpire, held_for=self._held_for())

    # For renew.

    def _begin_renew(self, ttl: float | None) -> Renew:
        self.check()
        return self._renew_command(ttl)

    def _end_renew(self, reply: Reply, sent_at: float, ttl: float | None) -> None:
        """Take in the answer to a renewal that the caller asked for; raises unless it was renewed."""
        tenure = self._tenure
        if isinstance(reply, NotHeld):
            name = self._command.target.name
            if tenure.state in STANDING:  # or it was released while this was under way
                self._not_held("renew", reply)
            raise LeaseNotHeld(
                f"{name!r} was not renewed: this lease (token {self._token}) had ended before",
                resource=name,
                held_by=reply.held_by,
            )
        with self._leases.mutex:
            if ttl is None:
                renewed = tenure.renewed(sent_at)
            else:
                self._command = self._command._replace(ttl_ms=ttl_ms(ttl))
                renewed = tenure.extended(sent_at, self._command.ttl_ms / 1000)
        if not renewed:
            self.check()  # it ended while this was under way
        self._leases._forget(self)
        self._early = sent_at + tenure.ttl / 4
        self._leases._look_after(self)
