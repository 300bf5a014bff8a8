"""Where leases come from, without the waiting: what `Leases` and `AsyncLeases` have in common.

Settings, policy, the gate in front of the backend, the orders that acquires are made of, and fork safety.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, TypedDict, TypeVar

from fencing.backends.base import Acquire, AsyncBackend, Backend, new
from fencing.clock import Clock, SystemClock
from fencing.errors import ConfigurationError, LeaseLost, LeaseUnavailable
from fencing.events import (
    Acquired,
    CallbackFailed,
    GivenBack,
    LoggingObserver,
    Observer,
    Observers,
    OrphanFound,
    PolicySwitched,
    Unavailable,
    log,
)
from fencing.flows import Held, unavailable
from fencing.gate import Gate, Seat
from fencing.held import LeaseCore, Order
from fencing.policies import Policy, Renewal, Wait, ttl_ms
from fencing.token import check_label, check_namespace, check_resource, new_holder

PolicySource = Policy | Callable[[], Policy]


class Options(TypedDict, total=False):
    """How to hold a lease, for one call; what is not given comes from the policy."""

    ttl: float | None
    """Seconds until it ends unless it is renewed, which happens in the background."""
    renewal: Renewal | None
    hold_to_ttl: bool | None
    """Neither renew nor release: it ends with its TTL."""
    label: str | None
    """Shown to people; host and process id when not given."""
    on_lost: Callable[[LeaseLost], object] | None
    """Called once when the lease is lost."""


class WaitOptions(Options, total=False):
    wait: float | Wait | None
    """How many seconds to wait for it, or a `Wait`."""


HELD_HERE: ContextVar[tuple[Seat, ...]] = ContextVar("fencing_held_here", default=())
"""The seats of leases that were acquired in this context, and are held.

A thread alone does not tell whether somebody asks for what it holds: frameworks run one request's enter, and
then another's, on the same pool thread, each in a context of its own.
"""


def alive(around: tuple[Seat, ...], seat: Seat) -> tuple[Seat, ...]:
    """The seats that are still held, and one more; only the last few, which is enough to catch a mistake."""
    if len(around) == 1 and around[0].lease is None:  # one lease after the other, which is the usual thing
        return (seat,)
    return (*[each for each in around if each.lease is not None][-15:], seat)


class LeasesCore:
    """Settings, policy, gate and orders: `Leases` without the doing."""

    def __init__(
        self,
        backend: Backend | AsyncBackend,
        *,
        namespace: str,
        has_ledger: bool,
        policy: PolicySource | None,
        label: str | None,
        observers: Iterable[Observer] | None,
        clock: Clock | None,
    ) -> None:
        self.backend: Any = backend
        self.namespace = check_namespace(namespace)
        self.clock = clock or SystemClock()
        self.gate = Gate()
        self.mutex = threading.Lock()
        self.tell = Observers((LoggingObserver(),) if observers is None else observers)
        self._label = None if label is None else check_label(label)
        self._has_ledger = has_ledger
        self._closed = False
        self._policy: PolicySource = Policy() if policy is None else policy
        self._last_policy: Policy | None = None
        self._started()
        self._checked_policy()
        _EVERYWHERE.add(self)

    def _started(self) -> None:
        """In a new process, by start or by fork."""
        self.life = object()
        self._default_label = (
            f"{socket.gethostname()}:{os.getpid()}"[:100] if self._label is None else self._label
        )

    @property
    def policy(self) -> Policy:
        """The policy as it is now. Set a `Policy`, or a callable that is asked at each decision, to switch it
        while leases are held: the next renewal goes by the new one."""
        return self._policy_now()

    @policy.setter
    def policy(self, policy: PolicySource) -> None:
        before, self._policy = self._policy, policy
        try:
            now = self._checked_policy()
        except BaseException:
            self._policy = before
            raise
        if PolicySwitched in self.tell.wanted:
            self.tell(PolicySwitched(namespace=self.namespace, resource="", policy=repr(now)))

    def _policy_now(self) -> Policy:
        """What the policy says at this moment; a callable that fails leaves the last good one in force."""
        source = self._policy
        if type(source) is Policy:
            return source
        try:
            return self._checked_policy()
        except Exception as error:
            self._callback_failed("policy", error)
            if self._last_policy is None:
                raise
            return self._last_policy

    def _checked_policy(self) -> Policy:
        policy = self._policy() if callable(self._policy) else self._policy
        if not isinstance(policy, Policy):
            raise ConfigurationError(
                f"a policy is a fencing.Policy or a callable that returns one, not {policy!r}"
            )
        self._check_renewal(policy.renewal)
        self._last_policy = policy
        return policy

    def _check_renewal(self, renewal: Renewal) -> None:
        if renewal.on_failure == "continue" and not self._has_ledger:
            raise ConfigurationError(
                "on_failure='continue' goes on working when the lease may be gone, so the database must be "
                "able to refuse: pass ledger=..., or use 'fence'"
            )

    def _order(
        self,
        resources: tuple[str, ...],
        ttl: float | None = None,
        wait: float | Wait | None = None,
        renewal: Renewal | None = None,
        hold_to_ttl: bool | None = None,
        label: str | None = None,
    ) -> Order:
        """Check everything before anything is sent."""
        if self._closed:
            self._raise_closed()
        source = self._policy
        policy = source if type(source) is Policy else self._policy_now()
        if len(resources) == 1:  # several were checked when they were counted
            check_resource(resources[0])
        if renewal is not None:
            if not isinstance(renewal, Renewal):
                raise ConfigurationError(f"renewal is a fencing.Renewal, not {renewal!r}")
            self._check_renewal(renewal)
        if wait is None:
            wait = policy.wait
        elif not isinstance(wait, Wait):
            wait = replace(policy.wait, budget=wait)
        hold = policy.hold_to_ttl
        if hold_to_ttl is not None:
            if type(hold_to_ttl) is not bool:
                raise ConfigurationError(f"hold_to_ttl is True or False, not {hold_to_ttl!r}")
            hold = hold_to_ttl
        target = self.backend.target(self.namespace, resources)
        label = self._default_label if label is None else check_label(label)
        whole = ttl_ms(policy.ttl if ttl is None else ttl)
        command = new(Acquire, (target, new_holder(), label, whole, 0, not hold))
        return new(Order, (command, wait, renewal, hold, self.clock.now()))

    def _raise_closed(self) -> NoReturn:
        raise ConfigurationError(f"these leases of {self.namespace!r} are closed")

    @staticmethod
    def _several(resources: Iterable[str]) -> tuple[str, ...]:
        if isinstance(resources, str):
            raise ConfigurationError(f"acquire_all takes several resources, not the one string {resources!r}")
        names = tuple(dict.fromkeys(map(check_resource, resources)))
        if not names:
            raise ConfigurationError("name at least one resource")
        return names

    def _look_after(self, lease: Any) -> None:
        """Renew the lease from now on."""
        raise NotImplementedError

    def _forget(self, lease: Any) -> None:
        """Do not renew the lease any more."""
        raise NotImplementedError

    def _admitted(self, lease: LeaseCore, order: Order, held: Held) -> None:
        """Tell what there is to tell of a lease just acquired."""
        for orphan in held.orphans:
            lease._tell(OrphanFound, previous=orphan.previous, unowned=orphan.unowned)
        if Acquired in self.tell.wanted:
            lease._tell(Acquired, waited=held.since - order.started, asked=held.asked)

    def _gave_back(self, command: Acquire, held: Held, cause: BaseException) -> None:
        self.tell(
            GivenBack(
                namespace=self.namespace,
                resource=command.target.name,
                holder=command.holder,
                token=held.token,
                label=command.label,
                cause=type(cause).__name__,
            )
        )

    def _refused(self, order: Order, error: BaseException) -> None:
        if isinstance(error, LeaseUnavailable) and Unavailable in self.tell.wanted:
            self.tell(
                Unavailable(
                    namespace=self.namespace,
                    resource=error.resource,
                    waited=self.clock.now() - order.started,
                    held_by=error.held_by,
                )
            )

    def _busy_here(self, order: Order, resource: str) -> LeaseUnavailable:
        """Somebody else in this process holds it; nobody was asked."""
        waited = self.clock.now() - order.started
        held_by = self.gate.held_by(resource)
        return unavailable(order.command.target.name, held_by, waited, "others here are asking for it")

    def _leave_gate(self, resources: tuple[str, ...], seat: Seat) -> None:
        for resource in resources:
            self.gate.withdraw(resource, seat)

    def _callback_failed(self, callback: str, error: BaseException, resource: str = "") -> None:
        self.tell(
            CallbackFailed(namespace=self.namespace, resource=resource, callback=callback, error=repr(error))
        )

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's is ours."""
        self.gate = Gate()
        self.mutex = threading.Lock()
        self._started()


# A forked child has copies of everything; these make sure that it uses none of its parent's leases.
_EVERYWHERE: weakref.WeakSet[LeasesCore] = weakref.WeakSet()


def _after_fork() -> None:
    global _SHARING
    _SHARING = threading.Lock()
    for leases in tuple(_EVERYWHERE):
        try:
            leases.after_fork()
        except Exception:  # noqa: BLE001  the others must get over it all the same
            log.exception("leases of %r did not get over the fork", leases.namespace)


os.register_at_fork(after_in_child=_after_fork)


jitter = random.random

_SHARED: weakref.WeakValueDictionary[tuple[object, int], Any] = weakref.WeakValueDictionary()
_SHARING = threading.Lock()
S = TypeVar("S")


def shared(kind: object, owner: object, make: Callable[[], S]) -> S:
    """The one thing of its kind for `owner` (a pool, a backend) in this process, for as long as it is used.

    Safe because what is made keeps its owner alive, so that an id is not reused while it stands here.
    """
    with _SHARING:
        found: S | None = _SHARED.get((kind, id(owner)))
        if found is None:
            found = _SHARED[kind, id(owner)] = make()
        return found


_OPTIONS = ("ttl", "wait", "renewal", "hold_to_ttl", "label")


def hold_options(options: WaitOptions) -> tuple[Any, ...]:
    """The options as `LeasesCore._order` takes them."""
    unknown = [name for name in options if name not in WaitOptions.__annotations__]
    if unknown:
        raise TypeError(
            f"there is no option {', '.join(unknown)}; there is {', '.join((*_OPTIONS, 'on_lost'))}"
        )
    return tuple(options.get(name) for name in _OPTIONS)


def wrong_client(takes: str, client: object, other: str) -> ConfigurationError:
    kind = type(client)
    if isinstance(client, str):
        hint = "make a client of it with .from_url(...)"
    elif kind.__module__.startswith("redis."):
        hint = (
            f"use {other} with it" if kind.__name__ == "Redis" else "that kind of client is not supported yet"
        )
    else:
        hint = "pass your client"
    return ConfigurationError(f"{takes} or a backend, not a {kind.__module__}.{kind.__qualname__}: {hint}")
