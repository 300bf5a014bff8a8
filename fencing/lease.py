"""Leases for threads: `Leases` hands them out, `Lease` is one that is held."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

from fencing.backends.base import (
    CALL_TIMEOUT,
    Backend,
    Done,
    Granted,
    LedgerProtocol,
    Peek,
    Release,
    Renew,
    Reply,
    Seen,
    new,
)
from fencing.clock import Clock
from fencing.errors import BackendUnavailable, ConfigurationError, LeaseLost, LeaseUnavailable
from fencing.events import Acquired, Observer
from fencing.flows import Answer, Ask, Claim, Held, Sleep, Step, Tell, acquire, release
from fencing.gate import Seat
from fencing.held import LeaseCore, Order
from fencing.holding import held_call
from fencing.leasing import (
    HELD_HERE,
    LeasesCore,
    Options,
    PolicySource,
    WaitOptions,
    alive,
    hold_options,
    jitter,
    shared,
    wrong_client,
)
from fencing.policies import Renewal, Wait
from fencing.renewal import Renewer
from fencing.tenure import State
from fencing.token import HeldBy, check_resource

if TYPE_CHECKING:
    import redis

P = ParamSpec("P")
R = TypeVar("R")

OnLost = Callable[[LeaseLost], object]


class Lease(LeaseCore):
    """A held lease. Leaving its `with` block releases it; any thread may check, use or release it."""

    __slots__ = ()
    _leases: Leases

    def __enter__(self) -> Lease:
        leases = self._leases
        fresh = self._tenure.state is State.HELD and self._born is leases.life
        if not fresh or leases.clock.now() > self._early:
            self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, without ever raising for it: the work is done, and what failed is told as an event."""
        if not self._leaves():
            try:
                self.release()
            except Exception:  # noqa: BLE001  told as an event where it happened
                pass

    def release(self) -> None:
        """Free the resource now.

        Raises `LeaseNotHeld` when the lease was not held any more (nothing is deleted then), `LeaseLost` when
        it was abandoned or nobody knows, `BackendUnavailable` when the backend does not answer within 2 s.
        """
        command = self._begin_release()
        if command is None:
            return
        leases = self._leases
        started = leases.clock.now()
        first: Reply | BaseException
        try:
            first = leases.backend.ask(command, CALL_TIMEOUT)
        except BaseException as error:  # noqa: BLE001  the flow decides what it means
            first = error
        if type(first) is Done:
            self._end_release(first)
            return
        flow = release(command, now=leases.clock.now, started=started, first=first)
        try:
            freed = leases._drive(flow)
        except BaseException as error:
            self._release_failed(error)
            raise
        self._freed(freed)

    def renew(self) -> None:
        """Count the TTL anew, now. Rarely needed: it happens in the background.

        Raises `LeaseLost`, or `LeaseNotHeld` when the backend says so, or `BackendUnavailable`.
        """
        self._renew(None)

    def extend(self, ttl: float) -> None:
        """Hold on for `ttl` seconds from now, and renew to that from here on. Raises as `renew`.

        Less than is left counts here at once; the backend never shortens, others wait for the longer time.
        """
        self._renew(ttl)

    def _renew(self, ttl: float | None) -> None:
        leases = self._leases
        sent_at = leases.clock.now()
        command = self._begin_renew(ttl)
        self._end_renew(leases._ask_twice(command), sent_at, ttl)

    def _announce_loss(self) -> None:
        if self._on_lost is not None:
            # A thread of its own: the renewer must not wait for what the callback does.
            threading.Thread(target=self._call_on_lost, name="fencing-on-lost", daemon=True).start()

    def _call_on_lost(self) -> None:
        try:
            self._on_lost(self._tenure.lost)
        except Exception as error:  # noqa: BLE001  told, never raised into the renewer
            self._leases._callback_failed("on_lost", error, self._command.target.name)


class Leases(LeasesCore):
    """Hands out leases on resources of one namespace, each with a token above all before it.

    `client` is your `redis.Redis`, or a backend. With a `ledger` every acquisition is also claimed at the
    database before you get it. `policy` is a `Policy` or a callable that returns one; `observers` receive
    events (a logger gets the warnings when you give none).

    Example::

        leases = Leases(redis.Redis(), namespace="billing")
        with leases.acquire("invoice:42", ttl=30) as lease:
            print(lease.token)
    """

    backend: Backend

    def __init__(
        self,
        client: redis.Redis | Backend,
        *,
        namespace: str = "default",
        ledger: LedgerProtocol | None = None,
        policy: PolicySource | None = None,
        label: str | None = None,
        observers: Iterable[Observer] | None = None,
        shards: int = 1,
        clock: Clock | None = None,
    ) -> None:
        backend = _backend_of(client, shards)
        if ledger is not None and inspect.iscoroutinefunction(getattr(ledger, "claim", None)):
            raise ConfigurationError("this ledger is asynchronous: use AsyncLeases with it")
        self.ledger = ledger
        super().__init__(
            backend,
            namespace=namespace,
            has_ledger=ledger is not None,
            policy=policy,
            label=label,
            observers=observers,
            clock=clock or getattr(backend, "clock", None),
        )
        self._renewer = shared(Renewer, backend, lambda: Renewer(backend, self.clock))

    def acquire(
        self,
        resource: str,
        *,
        ttl: float | None = None,
        wait: float | Wait | None = None,
        renewal: Renewal | None = None,
        hold_to_ttl: bool | None = None,
        label: str | None = None,
        on_lost: OnLost | None = None,
    ) -> Lease:
        """A held lease on the resource, after waiting for it if need be.

        What is not given comes from the policy. `wait` is a budget in seconds, or a `Wait`. `on_lost` is called
        once, in a thread of its own, when the lease is lost.

        Raises `LeaseUnavailable` when somebody else holds it for longer than the budget, `BackendUnavailable`,
        `ConfigurationError`, `TokenRegression`, or what the ledger raised.
        """
        order = self._order((resource,), ttl, wait, renewal, hold_to_ttl, label)
        return self._take(order, on_lost)

    def try_acquire(self, resource: str, **options: Unpack[Options]) -> Lease | None:
        """A held lease if the resource is free now, else None. Errors are raised: they are not contention.

        The options are those of `acquire`, but `wait`.
        """
        try:
            return self.acquire(resource, wait=0.0, **options)
        except LeaseUnavailable:
            return None

    def acquire_all(self, resources: Iterable[str], **options: Unpack[WaitOptions]) -> Lease:
        """One lease on several resources, all or none: one holder, one token. Otherwise as `acquire`."""
        order = self._order(self._several(resources), *hold_options(options))
        return self._take(order, options.get("on_lost"))

    def peek(self, resource: str) -> HeldBy | None:
        """Who holds the resource, or None when it is free. One round trip; true when it was asked."""
        if self._closed:
            self._raise_closed()
        target = self.backend.target(self.namespace, (check_resource(resource),))
        self._renewer.watch()
        reply = self._ask_twice(Peek(target))
        assert isinstance(reply, Seen)
        return reply.held_by

    def holding(
        self, resource: str, **options: Unpack[WaitOptions]
    ) -> Callable[[Callable[P, R]], Callable[..., R]]:
        """A decorator: each call holds a lease, whose resource is formatted with the call's arguments.

        A parameter named `lease` receives the lease. The options are those of `acquire`.

        Example::

            @leases.holding("invoice:{invoice_id}")
            def settle(invoice_id: int, lease: Lease) -> None: ...
        """

        def decorate(function: Callable[P, R]) -> Callable[..., R]:
            call_of = held_call(resource, function)
            if inspect.iscoroutinefunction(function):
                raise ConfigurationError(f"{function.__qualname__} is a coroutine: use AsyncLeases.holding")
            hold_options(options)

            @functools.wraps(function)
            def held(*args: Any, **kwargs: Any) -> R:
                call = call_of(args, kwargs)
                with self.acquire(call.resource, **options) as lease:
                    args, kwargs = call.arguments(lease)
                    return function(*args, **kwargs)

            return held

        return decorate

    def close(self) -> None:
        """Release what is still held here, stop renewing, and close our connections. Your client stays open."""
        self._closed = True
        for lease in self._renewer.leases():
            if isinstance(lease, Lease) and lease._leases is self:
                lease.__exit__(None, None, None)
        self.backend.rest()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, order: Order, on_lost: OnLost | None) -> Lease:
        command, now = order.command, self.clock.now
        resources = command.target.resources
        seat = Seat(threading.get_ident(), around := HELD_HERE.get())
        if len(resources) > 1 or not self.gate.enter(resources[0], seat):
            self._pass_gate(order, seat)
        lease: Lease | None = None
        held: Held | None = None
        try:
            if self._closed:
                self._raise_closed()
            since = now()
            first: Reply | BaseException
            try:
                first = self.backend.ask(command, CALL_TIMEOUT)
            except BaseException as error:  # noqa: BLE001  the flow decides what it means
                first = error
            if type(first) is Granted and self.ledger is None and now() < since + command.ttl_ms / 1000:
                held = new(Held, (first.token, since, first.orphans, 1))
            else:
                claims = self.ledger is not None
                flow = acquire(
                    command,
                    order.wait,
                    now=now,
                    roll=jitter,
                    started=order.started,
                    claims=claims,
                    first=first,
                    since=since,
                )
                held = self._drive(flow)
            lease = Lease(self, order, held, seat, on_lost)
            seat.lease = lease
            HELD_HERE.set((seat,) if not around else alive(around, seat))
            self._renewer.add(lease)
            if held.orphans or Acquired in self.tell.wanted:
                self._admitted(lease, order, held)
        except BaseException as error:
            self._leave_gate(resources, seat)
            self._refused(order, error)
            if held is not None:  # it does not reach the caller
                self._give_back(lease, order, held, error)
            raise
        return lease

    def _give_back(self, lease: Lease | None, order: Order, held: Held, cause: BaseException) -> None:
        command = order.command
        if lease is not None:
            self._forget(lease)
            lease._tenure.lose(command.target.name, "unknown")
        try:
            self.backend.ask(Release(command.target, command.holder), CALL_TIMEOUT)
        except Exception:  # noqa: BLE001  what stopped us is the news; it runs out by itself
            return
        self._gave_back(command, held, cause)

    def _pass_gate(self, order: Order, seat: Seat) -> None:
        """Wait for our turn among the threads of this process, within the budget."""
        resources = order.command.target.resources
        budget, turn = order.wait.budget, _Turn()
        try:
            for resource in sorted(resources):
                if self.gate.enter(resource, seat, queue=turn.prepare if budget > 0 else None):
                    continue
                waited = self.clock.now() - order.started
                if budget <= 0 or not turn.wait(budget - waited):
                    raise self._busy_here(order, resource)
        except BaseException as error:
            self._leave_gate(resources, seat)
            self._refused(order, error)
            raise

    def _ask_twice(self, command: Renew | Peek) -> Reply:
        """Ask, and again when that failed at once: a kept connection may have been closed meanwhile."""
        started = self.clock.now()
        try:
            return self.backend.ask(command, CALL_TIMEOUT)
        except BackendUnavailable:
            if self.clock.now() - started > CALL_TIMEOUT / 4:
                raise
        return self.backend.ask(command, CALL_TIMEOUT)

    def _drive(self, flow: Generator[Step, Answer, R]) -> R:
        """Do what a flow says it needs."""
        answer: Answer = None
        failure: BaseException | None = None
        try:
            while True:
                step = flow.send(answer) if failure is None else flow.throw(failure)
                answer = failure = None
                try:
                    if type(step) is Ask:
                        answer = self.backend.ask(step.command, step.timeout)
                    elif type(step) is Claim:
                        assert self.ledger is not None
                        answer = self.ledger.claim(step.grant)
                    elif type(step) is Sleep:
                        self.clock.sleep(step.seconds)
                    elif type(step) is Tell:
                        self.tell(step.event)
                except BaseException as error:  # noqa: BLE001  the flow decides what it means
                    failure = error
        except StopIteration as end:
            return cast(R, end.value)

    def _look_after(self, lease: Lease) -> None:
        self._renewer.add(lease)

    def _forget(self, lease: Lease) -> None:
        self._renewer.drop(lease)

    def after_fork(self) -> None:
        super().after_fork()
        self.backend.after_fork()
        self._renewer.after_fork()


class _Turn:
    """A thread waits for its turn at the gate."""

    __slots__ = ("_lock",)

    def prepare(self) -> Callable[[], None]:
        self._lock = threading.Lock()
        self._lock.acquire()
        return self._lock.release

    def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(seconds, 0.0))


def _backend_of(client: redis.Redis | Backend, shards: int) -> Backend:
    ask = getattr(client, "ask", None)
    if ask is not None:
        if inspect.iscoroutinefunction(ask):
            raise ConfigurationError("this backend is asynchronous: use AsyncLeases with it")
        return cast(Backend, client)
    import redis

    from fencing.backends.redis import RedisBackend

    if not isinstance(client, redis.Redis):
        raise wrong_client("Leases takes a redis.Redis", client, "AsyncLeases")
    pool = client.connection_pool
    return shared((RedisBackend, shards), pool, lambda: RedisBackend(client, shards=shards))
