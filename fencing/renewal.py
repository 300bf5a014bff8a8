"""One renewer for all leases of a process on one backend: a thread, or a timer of the event loop.

It sleeps until something is due, renews all that is due in one batch, and tells each lease how that went.
A backend that does not answer holds up only its own renewer, so each backend has one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Sequence
from math import inf
from typing import Any

from fencing.backends.base import AsyncBackend, Backend, Renew, Reply
from fencing.clock import Clock
from fencing.errors import BackendUnavailable, FencingError
from fencing.wheel import R, Renewable, Wheel

log = logging.getLogger("fencing")

IDLE = 10.0
"""Seconds without a lease after which a renewer gives back connections and ends."""


def _batches(leases: Iterable[R], now: float) -> dict[float, list[tuple[R, Renew]]]:
    """What to send, by how long it may take, the shortest first."""
    batches: dict[float, list[tuple[R, Renew]]] = {}
    for lease in leases:
        wanted = lease._attend(now)
        if wanted is not None:
            command, bound = wanted
            batches.setdefault(bound, []).append((lease, command))
    return dict(sorted(batches.items()))


def _settle(
    batch: Sequence[tuple[R, Renew]],
    answers: Sequence[Reply | FencingError],
    sent_at: float,
    took: float,
) -> None:
    missing = BackendUnavailable("the backend left out an answer")
    for at, (lease, _) in enumerate(batch):
        lease._settle(answers[at] if at < len(answers) else missing, sent_at, took)


def _broken(error: Exception, count: int) -> Sequence[Reply | FencingError]:
    """A backend that raises has a fault of its own: its leases fail as if it had not answered."""
    log.error("a backend raised instead of answering", exc_info=error)
    return [BackendUnavailable(f"the backend raised {error!r}")] * count


class Renewer:
    """Renews leases from a daemon thread, which is there only while there is something to do."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._wheel: Wheel[Renewable] = Wheel()
        self._condition = threading.Condition(threading.Lock())
        self._new: dict[Renewable, None] = {}
        self._turning: list[Renewable] = []  # in neither, while the renewer sees to them
        self._thread: threading.Thread | None = None
        self._wake_at = inf  # when the thread wakes by itself
        self._used = False  # since it last woke
        self._attended = clock.attend(self.turn)

    def add(self, lease: Renewable) -> None:
        """Look after the lease from now on."""
        # Most leases are released before the renewer comes to look: they only pass through this dict, and
        # cost no lock and no place in the wheel. Safe because this puts first and then looks at the time,
        # and the renewer sets the time first and then looks at the dict: one of the two sees the other.
        self._new[lease] = None
        self._used = True
        if lease._early < self._wake_at:
            with self._condition:
                if self._thread is None:
                    self._start()
                elif lease._early < self._wake_at:
                    self._wake_at = lease._early
                    self._condition.notify()

    def drop(self, lease: Renewable) -> None:
        if self._new.pop(lease, self) is self:
            with self._condition:
                self._wheel.drop(lease)

    def leases(self) -> list[Renewable]:
        with self._condition:
            return list(dict.fromkeys([*self._new, *self._turning, *self._wheel.leases()]))

    def _file(self, leases: Iterable[Renewable]) -> None:
        # What a lease says may be its user's code (a policy callable, an observer): never under the lock.
        dues = [(lease, due) for lease in leases if (due := lease._next_due()) is not None]
        with self._condition:
            for lease, due in dues:
                self._wheel.put(lease, *due)

    def _take_new(self) -> list[Renewable]:
        taken = self._turning = list(self._new)
        for lease in taken:
            self._new.pop(lease, None)  # or it was released this very moment
        return taken

    def watch(self) -> None:
        """See to it that connections kept by the backend are given back when nothing happens any more."""
        self._used = True
        if self._thread is None:
            with self._condition:
                if self._thread is None:
                    self._start()

    def turn(self) -> float | None:
        """Do all that is due; when to come again."""
        self._file(self._take_new())
        with self._condition:
            leases = self._turning = self._wheel.due(self._clock.now())
        try:
            for bound, batch in _batches(leases, self._clock.now()).items():
                sent_at = self._clock.now()
                try:
                    answers = self._backend.ask_many([command for _, command in batch], bound)
                except Exception as error:  # noqa: BLE001  told, and counted as a failure
                    answers = _broken(error, len(batch))
                _settle(batch, answers, sent_at, self._clock.now() - sent_at)
        finally:
            self._file(leases)
            self._turning = []
        with self._condition:
            return self._wheel.next()

    def _start(self) -> None:
        if self._attended:
            return
        thread = threading.Thread(target=self._run, name="fencing-renewer", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                self.turn()
            except Exception:
                log.exception("a turn of the renewer failed; it goes on")
            self._rest(IDLE)
            with self._condition:
                used, self._used = self._used, False
                due = self._wheel.next()
                idle = self._clock.now() + IDLE
                self._wake_at = idle if due is None else min(due, idle)
                for lease in tuple(self._new):
                    self._wake_at = min(self._wake_at, lease._early)
                if due is None and not used and not self._new:
                    self._thread, self._wake_at = None, inf
                    break
                while (left := self._wake_at - self._clock.now()) > 0:
                    self._condition.wait(left)
        self._rest(0.0)

    def _rest(self, unused_for: float) -> None:
        try:
            self._backend.rest(unused_for)
        except Exception:
            log.exception("a backend could not give back what nobody uses")

    def after_fork(self) -> None:
        """In a forked child: look after nothing; the leases are the parent's."""
        self._new, self._turning, self._wheel = {}, [], Wheel()
        self._condition = threading.Condition(threading.Lock())
        self._thread, self._wake_at = None, inf


class AsyncRenewer:
    """Renews leases from a timer of the running event loop; a task is there only while it renews."""

    def __init__(self, backend: AsyncBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._wheel: Wheel[Renewable] = Wheel()
        self._new: dict[Renewable, None] = {}
        self._turning: dict[Renewable, None] = {}  # in neither, while a turn sees to them
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_at = inf  # when the timer goes off
        self._used = False  # since it last did
        self._rests_at = 0.0  # when to look for connections that nobody uses
        self._tasks: set[asyncio.Task[None]] = set()
        self._attended = clock.attend_async(self.turn)

    def add(self, lease: Renewable) -> None:
        """Look after the lease from now on."""
        self._new[lease] = None
        self._used = True
        if lease._early < self._wake_at or asyncio.get_running_loop() is not self._loop:
            self._arm(lease._early)

    def drop(self, lease: Renewable) -> None:
        if self._new.pop(lease, self) is self:
            self._wheel.drop(lease)

    def leases(self) -> list[Renewable]:
        return list(dict.fromkeys([*self._new, *self._turning, *self._wheel.leases()]))

    def _file(self, leases: Iterable[Renewable]) -> None:
        for lease in leases:
            due = lease._next_due()
            if due is not None:
                self._wheel.put(lease, *due)

    def _due(self) -> list[Renewable]:
        new, self._new = self._new, {}
        self._file(new)
        return self._wheel.due(self._clock.now())

    def watch(self) -> None:
        """See to it that connections kept by the backend are given back when nothing happens any more."""
        self._used = True
        if self._timer is None or asyncio.get_running_loop() is not self._loop:
            self._arm(self._clock.now() + IDLE)

    async def turn(self) -> float | None:
        """Do all that is due; when to come again."""
        await self._renew(self._due())
        return self._wheel.next()

    async def _renew(self, leases: list[Renewable]) -> None:
        self._turning.update(dict.fromkeys(leases))
        try:
            batches = _batches(leases, self._clock.now())
            await asyncio.gather(*(self._send(bound, batch) for bound, batch in batches.items()))
        finally:
            for lease in leases:
                self._turning.pop(lease, None)
            self._file(leases)

    async def _send(self, bound: float, batch: list[tuple[Renewable, Renew]]) -> None:
        sent_at = self._clock.now()
        try:
            answers = await self._backend.ask_many([command for _, command in batch], bound)
        except Exception as error:  # noqa: BLE001  told, and counted as a failure
            answers = _broken(error, len(batch))
        _settle(batch, answers, sent_at, self._clock.now() - sent_at)

    def _arm(self, at: float) -> None:
        if self._attended:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._loop is loop:
            if self._wake_at <= at:
                return
            self._timer.cancel()
        at = min(at, self._clock.now() + IDLE)
        self._loop = loop
        self._wake_at = at
        self._timer = loop.call_later(max(at - self._clock.now(), 0.0), self._fire)

    def _fire(self) -> None:
        # Each turn is a task of its own: one that waits for a deaf backend does not hold up the next.
        self._timer, self._wake_at = None, inf
        leases = self._due()
        due = self._wheel.next()
        used, self._used = self._used, False
        if leases:
            self._spawn(self._renew(leases))
        if due is not None or used or self._tasks:
            self._arm(self._clock.now() + IDLE if due is None else due)
            if self._clock.now() >= self._rests_at:
                self._rests_at = self._clock.now() + IDLE
                self._spawn(self._backend.rest(IDLE))
        else:
            self._spawn(self._backend.rest())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="fencing-renewer")
        self._tasks.add(task)
        task.add_done_callback(self._spent)

    def _spent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.error("a turn of the renewer failed; it goes on", exc_info=task.exception())
        due = self._wheel.next()
        if due is not None:
            self._arm(due)

    async def stop(self) -> None:
        """End the timer and what it started."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wake_at = None, inf
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def after_fork(self) -> None:
        """In a forked child: look after nothing; the leases are the parent's."""
        self._new, self._turning, self._wheel = {}, {}, Wheel()
        self._timer, self._wake_at, self._tasks = None, inf, set()
