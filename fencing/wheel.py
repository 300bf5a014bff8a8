"""Which lease is due when: what the renewer knows of a lease, and where it files them."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

from fencing.backends.base import Renew, Reply
from fencing.errors import FencingError


class Renewable(Protocol):
    """What the renewer knows of a lease."""

    _slot: float
    """When it is due, rounded down; 0 when it is in no wheel."""

    _early: float
    """A time before which a new lease wants no attention."""

    def _next_due(self) -> tuple[float, float] | None:
        """When it next wants attention, and the grain to which that may be rounded down; None when never."""

    def _attend(self, now: float) -> tuple[Renew, float] | None:
        """What to send, with its bound; None when there was nothing to send (it may have expired)."""

    def _settle(self, answer: Reply | FencingError, sent_at: float, took: float) -> None:
        """Take in how its renewal went."""


R = TypeVar("R", bound=Renewable)


class Wheel(Generic[R]):
    """Leases by when they are due, in slots: adding and dropping cost the same however many there are."""

    __slots__ = ("_heap", "_slots")

    def __init__(self) -> None:
        self._slots: dict[float, dict[R, None]] = {}
        self._heap: list[float] = []

    def put(self, lease: R, at: float, grain: float) -> float:
        """File the lease, in one place; when it will be due."""
        self.drop(lease)
        slot = at - at % grain
        there = self._slots.get(slot)
        if there is None:
            there = self._slots[slot] = {}
            heapq.heappush(self._heap, slot)
        there[lease] = None
        lease._slot = slot
        return slot

    def drop(self, lease: R) -> None:
        there = self._slots.get(lease._slot)
        if there is not None:
            there.pop(lease, None)

    def due(self, now: float) -> list[R]:
        """Take out all that is due."""
        taken: list[R] = []
        while self._heap and self._heap[0] <= now:
            taken += self._slots.pop(heapq.heappop(self._heap))
        return taken

    def next(self) -> float | None:
        """When the first slot with a lease in it is due."""
        while self._heap and not self._slots[self._heap[0]]:
            del self._slots[heapq.heappop(self._heap)]
        return self._heap[0] if self._heap else None

    def leases(self) -> list[R]:
        return [lease for there in self._slots.values() for lease in there]
