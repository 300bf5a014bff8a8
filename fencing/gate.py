"""Waiters of one process queue here, first come first; only the first of them asks the backend.

A resource held in this process costs its other threads or tasks no request at all until it is free again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fencing.errors import ConfigurationError
from fencing.token import HeldBy


class Holding(Protocol):
    """What the gate knows of a lease."""

    @property
    def held(self) -> bool: ...

    def _as_held_by(self, resource: str) -> HeldBy: ...


class Seat:
    """One acquire at the gate: who asks, how to wake it, and, once it holds the lease, which.

    `around`: the seats inside which it is asked for; None when the owner alone tells.
    """

    __slots__ = ("around", "lease", "owner", "wake")

    def __init__(self, owner: object, around: tuple[Seat, ...] | None = None) -> None:
        self.owner = owner
        self.around = around
        self.wake: Callable[[], None] | None = None
        self.lease: Holding | None = None

    def waits_for_itself(self, inside: Seat) -> bool:
        return inside.owner == self.owner and (self.around is None or inside in self.around)


class Gate:
    """At most one seat a resource is inside; the others wait in the order they came."""

    __slots__ = ("_inside", "_mutex", "_queues")

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside: dict[str, Seat] = {}
        self._queues: dict[str, deque[Seat]] = {}

    def enter(
        self, resource: str, seat: Seat, *, queue: Callable[[], Callable[[], None]] | None = None
    ) -> bool:
        """Whether the seat is inside. If not it waits in line, when `queue` makes it a wake-up call.

        Raises `ConfigurationError` when the seat's own owner is inside: it would wait for itself.
        """
        # Safe because setdefault is one step: whoever is there first is inside, with or without the mutex, and
        # who leaves takes away only itself.
        if self._inside.setdefault(resource, seat) is seat:
            return True
        while True:
            with self._mutex:
                inside = self._inside.setdefault(resource, seat)
                if inside is seat:
                    return True
                lease = inside.lease
                if lease is None and not seat.waits_for_itself(inside):
                    return self._line_up(resource, seat, queue)
            # A lease that ran out unnoticed, because the process slept, leaves the gate when it is looked at.
            if lease is not None and not lease.held and self._is_outside(resource, inside):
                continue
            if seat.waits_for_itself(inside):
                raise ConfigurationError(
                    f"this thread or task holds {resource!r} already and asks for it again: leases are not "
                    "re-entrant; pass the lease along instead"
                )
            with self._mutex:
                if self._inside.get(resource) is inside:
                    return self._line_up(resource, seat, queue)

    def _line_up(self, resource: str, seat: Seat, queue: Callable[[], Callable[[], None]] | None) -> bool:
        if queue is not None:
            seat.wake = queue()
            self._queues.setdefault(resource, deque()).append(seat)
        return False

    def _is_outside(self, resource: str, seat: Seat) -> bool:
        with self._mutex:
            return self._inside.get(resource) is not seat

    def leave(self, resource: str, seat: Seat) -> None:
        """Let the next in line in. Does nothing when the seat is not inside (any more)."""
        with self._mutex:
            if self._inside.get(resource) is not seat:
                return
            line = self._queues.get(resource)
            if not line:
                del self._inside[resource]
                return
            following = line.popleft()
            if not line:
                del self._queues[resource]
            self._inside[resource] = following
        assert following.wake is not None
        following.wake()

    def withdraw(self, resource: str, seat: Seat) -> None:
        """Stop waiting; a seat that was let in meanwhile leaves again."""
        with self._mutex:
            line = self._queues.get(resource)
            if line is not None and seat in line:
                line.remove(seat)
                if not line:
                    del self._queues[resource]
                return
        self.leave(resource, seat)

    def held_by(self, resource: str) -> HeldBy | None:
        """What is known of the lease held in this process."""
        with self._mutex:
            seat = self._inside.get(resource)
        return seat.lease._as_held_by(resource) if seat is not None and seat.lease is not None else None

    def waiting(self, resource: str) -> int:
        with self._mutex:
            return len(self._queues.get(resource, ()))
