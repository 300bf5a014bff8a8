"""Leases for asyncio: `AsyncLeases` hands them out, `AsyncLease` is one that is held. Twins of `fencing.lease`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

from fencing.backends.base import (
    CALL_TIMEOUT,
    AsyncBackend,
    AsyncLedgerProtocol,
    Done,
    Granted,
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
    LeasesCore,
    Options,
    PolicySource,
    WaitOptions,
    hold_options,
    jitter,
    shared,
    wrong_client,
)
from fencing.policies import Renewal, Wait
from fencing.renewal import AsyncRenewer
from fencing.tenure import State
from fencing.token import HeldBy, check_resource

if TYPE_CHECKING:
    import redis.asyncio

P = ParamSpec("P")
R = TypeVar("R")

OnLost = Callable[[LeaseLost], object]
"""Called in the event loop; a coroutine function's coroutine is run as a task."""


class AsyncLease(LeaseCore):
    """A held lease. Leaving its `async with` block releases it; when it is lost, the task inside is cancelled
    and the block raises `LeaseLost`."""

    __slots__ = ("_cancelled", "_cancelling", "_loop", "_owner")
    _leases: AsyncLeases

    def __init__(self, leases: AsyncLeases, order: Order, held: Held, seat: Seat, on_lost: Any) -> None:
        super().__init__(leases, order, held, seat, on_lost)
        self._loop = asyncio.get_running_loop()
        self._owner: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._cancelling = 0

    async def __aenter__(self) -> AsyncLease:
        leases = self._leases
        fresh = self._tenure.state is State.HELD and self._born is leases.life
        if not fresh or leases.clock.now() > self._early:
            self.check()
        task = asyncio.current_task()
        assert task is not None
        self._owner = task
        self._cancelling = task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, without ever raising for it: the work is done, and what failed is told as an event."""
        owner, self._owner = self._owner, None
        if self._cancelled and owner is not None:
            # As asyncio.timeout does: the cancellation was ours, so it becomes the reason, unless somebody
            # else has asked for a cancellation as well.
            self._cancelled = False
            if owner.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise self._sticky() from error
            return
        if not self._leaves():
            try:
                await self.release()
            except Exception:  # noqa: BLE001  told as an event where it happened
                pass

    async def release(self) -> None:
        """Free the resource now.

        Raises `LeaseNotHeld` when the lease was not held any more (nothing is deleted then), `LeaseLost` when
        it was abandoned or nobody knows, `BackendUnavailable` when the backend does not answer within 2 s. A
        cancellation arrives after the release, not instead of it.
        """
        command = self._begin_release()
        if command is None:
            return
        leases = self._leases
        started = leases.clock.now()
        first: Reply | BaseException
        try:
            first = await leases.backend.ask(command, CALL_TIMEOUT)
        except BaseException as error:  # noqa: BLE001  the flow decides what it means
            first = error
        if type(first) is Done:
            self._end_release(first)
            return
        flow = release(command, now=leases.clock.now, started=started, first=first)
        try:
            freed = await leases._drive(flow, tidying=isinstance(first, asyncio.CancelledError))
        except BaseException as error:
            self._release_failed(error)
            raise
        self._freed(freed)

    async def renew(self) -> None:
        """Count the TTL anew, now. Rarely needed: it happens in the background.

        Raises `LeaseLost`, or `LeaseNotHeld` when the backend says so, or `BackendUnavailable`.
        """
        await self._renew(None)

    async def extend(self, ttl: float) -> None:
        """Hold on for `ttl` seconds from now, and renew to that from here on. Raises as `renew`.

        Less than is left counts here at once; the backend never shortens, others wait for the longer time.
        """
        await self._renew(ttl)

    async def _renew(self, ttl: float | None) -> None:
        leases = self._leases
        sent_at = leases.clock.now()
        command = self._begin_renew(ttl)
        self._end_renew(await leases._ask_twice(command), sent_at, ttl)

    def _sticky(self) -> LeaseLost:
        lost = self._tenure.lost
        assert lost is not None
        return lost

    def _announce_loss(self) -> None:
        try:
            running = asyncio.current_task()
        except RuntimeError:  # another thread has noticed
            running = None
        try:
            if running is None or running is not self._owner:
                self._loop.call_soon_threadsafe(self._cancel_owner)
            if self._on_lost is not None:
                self._loop.call_soon_threadsafe(self._call_on_lost)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            pass

    def _cancel_owner(self) -> None:
        if self._owner is not None and not self._cancelled:
            self._cancelled = True
            self._owner.cancel(str(self._tenure.lost))

    def _call_on_lost(self) -> None:
        name = self._command.target.name
        try:
            outcome = self._on_lost(self._tenure.lost)
        except Exception as error:  # noqa: BLE001  told, never raised into the event loop
            self._leases._callback_failed("on_lost", error, name)
            return
        if inspect.isawaitable(outcome):
            self._leases._spawn(self._await_on_lost(outcome))

    async def _await_on_lost(self, outcome: Awaitable[object]) -> None:
        try:
            await outcome
        except Exception as error:  # noqa: BLE001  told, never raised into the event loop
            self._leases._callback_failed("on_lost", error, self._command.target.name)


class Acquiring:
    """An acquisition that begins when it is awaited, for a held lease, or entered with ``async with``."""

    __slots__ = ("_begun", "_lease", "_leases", "_on_lost", "_options", "_resources")

    def __init__(
        self,
        leases: AsyncLeases,
        resources: tuple[str, ...],
        on_lost: OnLost | None,
        options: tuple[Any, ...],
    ) -> None:
        self._leases = leases
        self._resources = resources
        self._on_lost = on_lost
        self._options = options
        self._begun = False

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<acquire of {names}: begins when it is awaited, or entered with `async with`>"

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(f"{self!r} was never awaited", RuntimeWarning, stacklevel=2)

    def _take(self) -> Coroutine[Any, Any, AsyncLease]:
        if self._begun:
            raise ConfigurationError(f"{self!r} was used before: call acquire again, each call is one lease")
        self._begun = True
        leases = self._leases
        return leases._take(leases._order(self._resources, *self._options), self._on_lost)

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._take().__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self._take()
        return await self._lease.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lease.__aexit__(kind, error, trace)


class AsyncLeases(LeasesCore):
    """Hands out leases on resources of one namespace, each with a token above all before it.

    `client` is your `redis.asyncio.Redis`, or a backend. With a `ledger` every acquisition is also claimed at
    the database before you get it. `policy` is a `Policy` or a callable that returns one; `observers` receive
    events (a logger gets the warnings when you give none).

    Example::

        leases = AsyncLeases(redis.asyncio.Redis(), namespace="billing")
        async with leases.acquire("invoice:42", ttl=30) as lease:
            print(lease.token)
    """

    backend: AsyncBackend

    def __init__(
        self,
        client: redis.asyncio.Redis | AsyncBackend,
        *,
        namespace: str = "default",
        ledger: AsyncLedgerProtocol | None = None,
        policy: PolicySource | None = None,
        label: str | None = None,
        observers: Iterable[Observer] | None = None,
        shards: int = 1,
        clock: Clock | None = None,
    ) -> None:
        backend = _backend_of(client, shards)
        if ledger is not None and not inspect.iscoroutinefunction(getattr(ledger, "claim", None)):
            raise ConfigurationError("this ledger is synchronous: use Leases with it")
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
        self._renewer = shared(AsyncRenewer, backend, lambda: AsyncRenewer(backend, self.clock))
        self._tasks: set[asyncio.Task[Any]] = set()

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
    ) -> Acquiring:
        """A held lease on the resource, after waiting for it if need be.

        What is not given comes from the policy. `wait` is a budget in seconds, or a `Wait`. `on_lost` is called
        once, in the event loop, when the lease is lost; it may be a coroutine function.

        Raises `LeaseUnavailable` when somebody else holds it for longer than the budget, `BackendUnavailable`,
        `ConfigurationError`, `TokenRegression`, or what the ledger raised.
        """
        return Acquiring(self, (resource,), on_lost, (ttl, wait, renewal, hold_to_ttl, label))

    async def try_acquire(self, resource: str, **options: Unpack[Options]) -> AsyncLease | None:
        """A held lease if the resource is free now, else None. Errors are raised: they are not contention.

        The options are those of `acquire`, but `wait`.
        """
        try:
            return await self.acquire(resource, wait=0.0, **options)
        except LeaseUnavailable:
            return None

    def acquire_all(self, resources: Iterable[str], **options: Unpack[WaitOptions]) -> Acquiring:
        """One lease on several resources, all or none: one holder, one token. Otherwise as `acquire`."""
        names = self._several(resources)
        return Acquiring(self, names, options.get("on_lost"), hold_options(options))

    async def peek(self, resource: str) -> HeldBy | None:
        """Who holds the resource, or None when it is free. One round trip; true when it was asked."""
        if self._closed:
            self._raise_closed()
        target = self.backend.target(self.namespace, (check_resource(resource),))
        self._renewer.watch()
        reply = await self._ask_twice(Peek(target))
        assert isinstance(reply, Seen)
        return reply.held_by

    def holding(
        self, resource: str, **options: Unpack[WaitOptions]
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[..., Coroutine[Any, Any, R]]]:
        """A decorator: each call holds a lease, whose resource is formatted with the call's arguments.

        A parameter named `lease` receives the lease. The options are those of `acquire`.

        Example::

            @leases.holding("invoice:{invoice_id}")
            async def settle(invoice_id: int, lease: AsyncLease) -> None: ...
        """

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[..., Coroutine[Any, Any, R]]:
            call_of = held_call(resource, function)
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(f"{function.__qualname__} is no coroutine: use Leases.holding")
            hold_options(options)

            @functools.wraps(function)
            async def held(*args: Any, **kwargs: Any) -> R:
                call = call_of(args, kwargs)
                async with self.acquire(call.resource, **options) as lease:
                    args, kwargs = call.arguments(lease)
                    return await function(*args, **kwargs)

            return held

        return decorate

    async def aclose(self) -> None:
        """Release what is still held here, stop renewing, and close our connections. Your client stays open."""
        self._closed = True
        for lease in self._renewer.leases():
            if isinstance(lease, AsyncLease) and lease._leases is self:
                await lease.__aexit__(None, None, None)
        if all(isinstance(lease, AsyncLease) and lease._leases is self for lease in self._renewer.leases()):
            await self._renewer.stop()
        await self.backend.rest()

    async def __aenter__(self) -> AsyncLeases:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _take(self, order: Order, on_lost: OnLost | None) -> AsyncLease:
        command, now = order.command, self.clock.now
        resources = command.target.resources
        seat = Seat(asyncio.current_task())
        if len(resources) > 1 or not self.gate.enter(resources[0], seat):
            await self._pass_gate(order, seat)
        lease: AsyncLease | None = None
        held: Held | None = None
        try:
            if self._closed:
                self._raise_closed()
            since = now()
            first: Reply | BaseException
            try:
                first = await self.backend.ask(command, CALL_TIMEOUT)
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
                held = await self._drive(flow, tidying=isinstance(first, asyncio.CancelledError))
            lease = AsyncLease(self, order, held, seat, on_lost)
            seat.lease = lease
            self._renewer.add(lease)
            if held.orphans or Acquired in self.tell.wanted:
                self._admitted(lease, order, held)
        except BaseException as error:
            self._leave_gate(resources, seat)
            self._refused(order, error)
            if held is not None:  # it does not reach the caller
                await self._give_back(lease, order, held, error)
            raise
        return lease

    async def _give_back(
        self, lease: AsyncLease | None, order: Order, held: Held, cause: BaseException
    ) -> None:
        command = order.command
        if lease is not None:
            self._forget(lease)
            lease._tenure.lose(command.target.name, "unknown")
        try:
            await self.backend.ask(Release(command.target, command.holder), CALL_TIMEOUT)
        except Exception:  # noqa: BLE001  what stopped us is the news; it runs out by itself
            return
        self._gave_back(command, held, cause)

    async def _pass_gate(self, order: Order, seat: Seat) -> None:
        """Wait for our turn among the tasks of this process, within the budget."""
        resources = order.command.target.resources
        budget, turn = order.wait.budget, _Turn()
        try:
            for resource in sorted(resources):
                if self.gate.enter(resource, seat, queue=turn.prepare if budget > 0 else None):
                    continue
                waited = self.clock.now() - order.started
                if budget <= 0 or not await turn.wait(budget - waited):
                    raise self._busy_here(order, resource)
        except BaseException as error:
            self._leave_gate(resources, seat)
            self._refused(order, error)
            raise

    async def _ask_twice(self, command: Renew | Peek) -> Reply:
        """Ask, and again when that failed at once: a kept connection may have been closed meanwhile."""
        started = self.clock.now()
        try:
            return await self.backend.ask(command, CALL_TIMEOUT)
        except BackendUnavailable:
            if self.clock.now() - started > CALL_TIMEOUT / 4:
                raise
        return await self.backend.ask(command, CALL_TIMEOUT)

    async def _drive(self, flow: Generator[Step, Answer, R], *, tidying: bool = False) -> R:
        """Do what a flow says it needs. After a cancellation it only tidies up, and is not cancelled again."""
        answer: Answer = None
        failure: BaseException | None = None
        try:
            while True:
                step = flow.send(answer) if failure is None else flow.throw(failure)
                answer = failure = None
                try:
                    if type(step) is Ask:
                        asking = self.backend.ask(step.command, step.timeout)
                        answer = await (self._insist(asking) if tidying else asking)
                    elif type(step) is Claim:
                        assert self.ledger is not None
                        answer = await self.ledger.claim(step.grant)
                    elif type(step) is Sleep:
                        await self.clock.sleep_async(step.seconds)
                    elif type(step) is Tell:
                        self.tell(step.event)
                except BaseException as error:  # noqa: BLE001  the flow decides what it means
                    failure = error
                    tidying = tidying or isinstance(error, asyncio.CancelledError)
        except StopIteration as end:
            return cast(R, end.value)

    async def _insist(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, which is bounded, whoever wants to cancel us meanwhile."""
        task = self._spawn(work)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
            except Exception:  # noqa: BLE001  raised below, from the task itself
                break
        return task.result()

    def _spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run `work` as a task that is not collected before it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _look_after(self, lease: AsyncLease) -> None:
        self._renewer.add(lease)

    def _forget(self, lease: AsyncLease) -> None:
        self._renewer.drop(lease)

    def after_fork(self) -> None:
        super().after_fork()
        self.backend.after_fork()
        self._renewer.after_fork()


class _Turn:
    """A task waits for its turn at the gate."""

    __slots__ = ("_future",)

    def prepare(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        future = self._future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_from_anywhere() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed: nobody waits
                pass

        return wake_from_anywhere

    async def wait(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._future
        except TimeoutError:
            return False
        return True


def _backend_of(client: redis.asyncio.Redis | AsyncBackend, shards: int) -> AsyncBackend:
    ask = getattr(client, "ask", None)
    if ask is not None:
        if not inspect.iscoroutinefunction(ask):
            raise ConfigurationError("this backend is synchronous: use Leases with it")
        return cast(AsyncBackend, client)
    import redis.asyncio

    from fencing.backends.redis import AsyncRedisBackend

    if not isinstance(client, redis.asyncio.Redis):
        raise wrong_client("AsyncLeases takes a redis.asyncio.Redis", client, "Leases")
    pool = client.connection_pool
    return shared((AsyncRedisBackend, shards), pool, lambda: AsyncRedisBackend(client, shards=shards))
