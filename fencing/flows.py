"""The life of a lease, decided without doing: generators that say what they need.

`acquire` and `release` yield what is to be done (`Ask` the backend, `Claim` at the ledger, `Sleep`, `Tell` the
observers) and are sent what came of it. A driver of a few lines, one for threads and one for asyncio, does the
doing; a simulation or a test may do it as well. A failure, or a cancellation, is thrown in at the yield.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, assert_never

from fencing.backends.base import (
    CALL_TIMEOUT,
    Acquire,
    Behind,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Orphan,
    Poisoned,
    Release,
    Remint,
    Reply,
    Seen,
)
from fencing.errors import (
    BackendUnavailable,
    ConfigurationError,
    FencingError,
    LeaseUnavailable,
    TokenRegression,
)
from fencing.events import BackendFailed, Event, GivenBack, TokenRegressed
from fencing.policies import Wait
from fencing.token import Grant, HeldBy

ATTEMPTS = 3
"""How often in a row a request that failed is sent, within the time allowed."""

HEALS = 3
"""How often one acquire lifts a counter that is behind the ledger."""


class Ask(NamedTuple):
    """Send a command; answer with its reply, or throw in what went wrong."""

    command: Command
    timeout: float


class Claim(NamedTuple):
    """Claim at the ledger; answer with `Behind` or None, or throw in what went wrong."""

    grant: Grant


class Sleep(NamedTuple):
    seconds: float


class Tell(NamedTuple):
    event: Event


Step = Ask | Claim | Sleep | Tell
Answer = Reply | Behind | None


class Held(NamedTuple):
    """What an acquire got. The lease is valid from `since`, which is before the request was sent."""

    token: int
    since: float
    orphans: tuple[Orphan, ...]
    asked: int


def acquire(
    order: Acquire,
    wait: Wait,
    *,
    now: Callable[[], float],
    roll: Callable[[], float],
    started: float,
    claims: bool,
    first: Reply | BaseException | None = None,
    since: float | None = None,
) -> Generator[Step, Answer, Held]:
    """Ask until it is granted, claimed, or the time is over; give back what does not reach the caller.

    Raises `LeaseUnavailable` after the wait budget, `BackendUnavailable`, `TokenRegression`, or whatever the
    claim raised. When it is stopped from outside (Ctrl-C, cancellation) it first gives back what it got or
    may have got; a request that reaches the backend later than that leaves a lease nobody holds, for one TTL.

    The wait budget counts from `started`. `first`: what came of the order when it was sent at `since`, before
    there was a flow. Most acquires are over with it, and the caller need not begin one.
    """
    target, holder = order.target, order.holder
    ttl = order.ttl_ms / 1000
    command: Acquire | Remint = order
    since = started if since is None else since
    asked = failed = healed = token = 0
    orphans: tuple[Orphan, ...] = ()
    ours = False  # whether the backend has granted it to us, or may have
    try:
        while True:
            if command is order and first is None:
                since = now()
            asked += 1
            before, ours = ours, True
            try:
                reply, first = ((yield Ask(command, CALL_TIMEOUT)) if first is None else _given(first)), None
            except BackendUnavailable as error:
                first = None
                ours = before or error.sent
                failed += 1
                yield Tell(_failure("acquire", target.namespace, target.name, error))
                if failed >= ATTEMPTS or now() - started >= max(wait.budget, CALL_TIMEOUT):
                    raise
                yield Sleep(wait.backoff)
                continue
            except ConfigurationError:  # the backend refused the request itself: it has granted nothing by it
                ours = before
                raise
            failed = 0
            match reply:
                case Granted():
                    if command is order:
                        orphans = reply.orphans
                    else:
                        assert isinstance(command, Remint)
                        yield Tell(
                            TokenRegressed(
                                namespace=target.namespace,
                                resource=target.name,
                                holder=holder,
                                token=reply.token,
                                label=order.label,
                                ledger_token=command.floor,
                                refused_token=token,
                            )
                        )
                    token = reply.token
                    behind = None
                    if claims:
                        deadline = since + ttl
                        behind = yield Claim(
                            Grant(target.namespace, target.resources, holder, token, deadline, order.label)
                        )
                    if behind is None:
                        if now() < since + ttl:
                            return Held(token, since, orphans, asked)
                        command, held_by = (
                            order,
                            None,
                        )  # the answer or the claim outlasted the lease: begin again
                    else:
                        assert isinstance(behind, Behind)
                        healed += 1
                        if healed > HEALS:
                            raise _regression(target.name, token, behind.token)
                        # Safe because the backend mints only while the lease is still ours: a paused acquirer
                        # must not heal its way over a live holder.
                        command = Remint(target, holder, behind.token)
                        continue
                case Busy():
                    ours = before and len(target.resources) > 1  # an answer was lost: part may be ours still
                    held_by = reply.held_by
                case NotHeld():  # while healing: somebody took it meanwhile, so this acquire has lost
                    command, held_by, ours = order, reply.held_by, False
                    if len(target.resources) > 1:  # what is still ours of several is not kept while waiting
                        ours = True
                        yield Ask(Release(target, holder), CALL_TIMEOUT)
                        ours = False
                case Poisoned():
                    raise _regression(target.name, token or None, reply.floor)
                case Done() | Seen() | Behind() | None:
                    raise ConfigurationError(f"a backend does not answer an acquire with {reply!r}")
                case _:
                    assert_never(reply)
            waited = now() - started
            pause = wait.pause(waited=waited, left=held_by.time_left if held_by else 0.0, roll=roll())
            if pause is None:
                raise unavailable(target.name, held_by, waited)
            yield Sleep(pause)
    except BaseException as cause:
        if ours:
            try:
                yield Ask(Release(target, holder), CALL_TIMEOUT)
                yield Tell(
                    GivenBack(
                        namespace=target.namespace,
                        resource=target.name,
                        holder=holder,
                        token=token,
                        label=order.label,
                        cause=type(cause).__name__,
                    )
                )
            except FencingError as error:
                yield Tell(_failure("give back", target.namespace, target.name, error))
        raise


class Freed(NamedTuple):
    """What came of a release. `reply` None: the answer was lost and it is gone, by us or by time."""

    reply: Done | NotHeld | None
    stopped: BaseException | None = None
    """What stopped it from outside; to be raised when the outcome is taken in."""


def release(
    command: Release,
    *,
    now: Callable[[], float],
    started: float,
    bound: float = CALL_TIMEOUT,
    first: Reply | BaseException | None = None,
) -> Generator[Step, Answer, Freed]:
    """Free the lease within `bound` seconds.

    Raises `BackendUnavailable` when nobody knows; its `sent` says whether any request may have arrived. When
    it is stopped from outside it asks once more, and then says so. `first` is as in `acquire`.
    """
    unsure = False
    stopped: BaseException | None = None
    target = command.target
    attempt = 0
    while True:
        attempt += 1
        left = CALL_TIMEOUT if stopped else max(bound - (now() - started), 0.001)
        try:
            reply, first = ((yield Ask(command, left)) if first is None else _given(first)), None
        except FencingError as error:
            first = None
            unsure = unsure or getattr(error, "sent", False)
            yield Tell(_failure("release", target.namespace, target.name, error))
            if stopped is not None:
                raise stopped from error
            if not isinstance(error, BackendUnavailable):
                raise
            if attempt == ATTEMPTS or now() - started >= bound:
                error.sent = unsure
                raise
        except BaseException as error:
            if stopped is not None:
                raise
            first, stopped, unsure = None, error, True
        else:
            match reply:
                case Done():
                    return Freed(reply, stopped)
                case NotHeld():
                    return Freed(None if unsure else reply, stopped)
                case _:
                    raise ConfigurationError(f"a backend does not answer a release with {reply!r}")


def _given(first: Reply | BaseException) -> Reply:
    if isinstance(first, BaseException):
        raise first
    return first


def unavailable(
    name: str,
    held_by: HeldBy | None,
    waited: float,
    otherwise: str = "it was taken and lost while it was being claimed",
) -> LeaseUnavailable:
    if held_by is None:
        detail = otherwise
    else:
        who = held_by.label or held_by.holder
        detail = (
            f"{who} holds it (token {held_by.token}), for another {held_by.time_left:.3f} s unless renewed"
        )
    return LeaseUnavailable(
        f"{name!r} is not free after {waited:.3f} s: {detail}",
        resource=name,
        held_by=held_by,
        retry_after=None if held_by is None else held_by.time_left,
    )


def _regression(name: str, token: int | None, ledger_token: int) -> TokenRegression:
    if ledger_token == 0:
        text = f"the backend can mint no token for {name!r}: its counter or its clock is beyond 2^53"
    else:
        text = (
            f"the ledger is at {ledger_token} for {name!r} and the backend mints {token}: it could not be "
            "lifted above it (more than a year above its clock is refused, so that one bad token does not "
            "spread)"
        )
    return TokenRegression(
        text,
        resource=name,
        token=token,
        ledger_token=ledger_token,
    )


def _failure(verb: str, namespace: str, resource: str, error: FencingError) -> BackendFailed:
    return BackendFailed(
        namespace=namespace,
        resource=resource,
        verb=verb,
        sent=getattr(error, "sent", False),
        error=str(error),
    )
