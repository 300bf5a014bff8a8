"""A clock that stands still until you move it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class FakeClock:
    """Time for tests. Moving it does what is due on the way: renewals are sent, leases expire.

    Sleeping moves it too, so nothing that waits takes any time.
    """

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self._now = 1000.0
        self._epoch = wall - self._now
        self._turns: list[Callable[[], float | None]] = []
        self._async_turns: list[Callable[[], Awaitable[float | None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._epoch + self._now

    def set_wall(self, wall: float) -> None:
        """Let the wall clock jump; durations are not touched."""
        self._epoch = wall - self._now

    def pause(self, seconds: float) -> None:
        """Let time pass without anybody noticing, as a SIGSTOP does: nothing that is due happens."""
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Move on, and do on the way what falls due."""
        end = self._now + seconds
        while True:
            due = [at for turn in self._turns if (at := turn()) is not None]
            if not self._step(due, end):
                return

    async def advance_async(self, seconds: float) -> None:
        """Move on, and do on the way what falls due, for asyncio."""
        end = self._now + seconds
        while True:
            due = [at for turn in self._async_turns if (at := await turn()) is not None]
            if not self._step(due, end):
                return

    def _step(self, due: list[float], end: float) -> bool:
        upcoming = min(due, default=end)
        if upcoming > end or not due:
            self._now = max(self._now, end)
            return False
        self._now = max(self._now, upcoming)
        return True

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await self.advance_async(seconds)

    def attend(self, turn: Callable[[], float | None]) -> bool:
        self._turns.append(turn)
        return True

    def attend_async(self, turn: Callable[[], Awaitable[float | None]]) -> bool:
        self._async_turns.append(turn)
        return True
