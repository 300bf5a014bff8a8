"""The only reader of time. Durations come from a clock that keeps counting through a system suspend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Where time comes from, and who waits for it."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since the epoch, for people to read and for tokens of the memory backend."""

    def sleep(self, seconds: float) -> None: ...

    async def sleep_async(self, seconds: float) -> None: ...

    def attend(self, turn: Callable[[], float | None]) -> bool:
        """Whether this clock will itself call `turn` when time passes (a fake one does).

        `turn` does what is due and returns when it wants to be called next, or None.
        """

    def attend_async(self, turn: Callable[[], Awaitable[float | None]]) -> bool:
        """As `attend`, for a turn that is a coroutine."""


def _monotonic() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    return time.monotonic


class SystemClock:
    """The machine's clocks. CLOCK_MONOTONIC stands still while a laptop or a VM sleeps; Redis does not."""

    def __init__(self) -> None:
        self.now = _monotonic()

    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)
    sleep_async = staticmethod(asyncio.sleep)

    def attend(self, turn: Callable[[], float | None]) -> bool:
        return False

    def attend_async(self, turn: Callable[[], Awaitable[float | None]]) -> bool:
        return False
