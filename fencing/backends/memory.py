"""Leases in a dict of this process, by the same contract as Redis: for tests, yours and ours.

Two `Leases` on one `MemoryBackend` compete as two processes on one Redis would.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fencing.backends.base import (
    NOTE_KEEP_MS,
    Acquire,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Orphan,
    Peek,
    Poisoned,
    Release,
    Remint,
    Renew,
    Reply,
    Seen,
    Target,
)
from fencing.clock import Clock, SystemClock
from fencing.errors import BackendUnavailable, FencingError
from fencing.token import MAX_TOKEN, HeldBy

_YEAR_US = 365 * 86400 * 1_000_000
_Key = tuple[str, str]


@dataclass(slots=True)
class _Entry:
    holder: str
    token: int
    label: str
    acquired_at: float
    ends: float


class MemoryBackend:
    """Leases in a dict, for threads. `fail_next` and `lose_replies` play a backend in trouble."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._leases: dict[_Key, _Entry] = {}
        self._notes: dict[_Key, _Entry] = {}
        self._counters: dict[str, int] = {}
        self._failures = 0
        self._lost_replies = 0
        self.asked: list[Command] = []

    def fail_next(self, count: int) -> None:
        """The next `count` requests fail before they are carried out."""
        self._failures = count

    def lose_replies(self, count: int) -> None:
        """The next `count` requests are carried out, and their answers lost."""
        self._lost_replies = count

    def forget(self) -> None:
        """Lose everything, as a Redis without persistence does when it restarts."""
        with self._lock:
            self._leases.clear()
            self._notes.clear()
            self._counters.clear()

    def expire(self, namespace: str, resource: str) -> None:
        """End the lease on a resource now, as if its TTL had run out."""
        with self._lock:
            entry = self._leases.get((namespace, resource))
            if entry is not None:
                entry.ends = self.clock.now()

    def target(self, namespace: str, resources: tuple[str, ...]) -> Target:
        return Target(namespace, resources)

    def ask(self, command: Command, timeout: float) -> Reply:
        with self._lock:
            self.asked.append(command)
            if self._failures > 0:
                self._failures -= 1
                raise BackendUnavailable("the memory backend was told to fail", sent=False)
            reply = self._answer(command)
            if self._lost_replies > 0:
                self._lost_replies -= 1
                raise BackendUnavailable("the memory backend was told to lose this answer", sent=True)
            return reply

    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        answers: list[Reply | FencingError] = []
        for command in commands:
            try:
                answers.append(self.ask(command, timeout))
            except FencingError as error:
                answers.append(error)
        return answers

    def rest(self, unused_for: float = 0.0) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def _answer(self, command: Command) -> Reply:
        match command:
            case Acquire():
                return self._acquire(command)
            case Remint():
                return self._foreign(command) or self._remint(command)
            case Renew():
                return self._foreign(command) or self._renew(command)
            case Release():
                return self._release(command)
            case Peek(target):
                return Seen(self._look((target.namespace, target.resources[0])))

    def _acquire(self, command: Acquire) -> Reply:
        target = command.target
        keys = [(target.namespace, resource) for resource in target.resources]
        live = [self._live(key) for key in keys]
        for key, entry in zip(keys, live, strict=True):
            if entry is not None and entry.holder != command.holder:
                held_by = self._look(key)
                assert held_by is not None
                return Busy(held_by)
        now = self.clock.now()
        ends = now + command.ttl_ms / 1000
        held = [entry for entry in live if entry is not None]
        if len(held) == len(keys):
            for entry in held:
                entry.ends = max(entry.ends, ends)
            return Granted(held[0].token)
        token = self._mint(target.namespace, command.floor)
        if token is None:
            return Poisoned(command.floor)
        orphans = []
        for key in keys:
            note = self._notes.pop(key, None)
            mine = note is not None and note.holder == command.holder
            if note is not None and not mine and now - note.ends < NOTE_KEEP_MS / 1000:
                previous = HeldBy(key[1], note.holder, note.token, note.label, note.acquired_at, 0.0)
                orphans.append(Orphan(previous, max(now - note.ends, 0.0)))
            entry = _Entry(command.holder, token, command.label, self.clock.wall(), ends)
            self._leases[key] = entry
            if command.note:
                self._notes[key] = entry
        return Granted(token, tuple(orphans))

    def _remint(self, command: Remint) -> Reply:
        entries = self._entries(command)
        token: int | None = entries[0].token
        if entries[0].token <= command.floor:
            token = self._mint(command.target.namespace, command.floor)
        if token is None:
            return Poisoned(command.floor)
        for entry in entries:
            entry.token = token
        return Granted(token)

    def _renew(self, command: Renew) -> Reply:
        for entry in self._entries(command):
            entry.ends = max(entry.ends, self.clock.now() + command.ttl_ms / 1000)
        return Done()

    def _release(self, command: Release) -> Reply:
        foreign = self._foreign(command)
        for resource in command.target.resources:
            key = (command.target.namespace, resource)
            entry = self._live(key)
            if entry is not None and entry.holder == command.holder:
                del self._leases[key]
                self._notes.pop(key, None)
        return foreign or Done()

    def _foreign(self, command: Remint | Renew | Release) -> NotHeld | None:
        for resource in command.target.resources:
            held_by = self._look((command.target.namespace, resource))
            if held_by is None or held_by.holder != command.holder:
                return NotHeld(resource, held_by)
        return None

    def _entries(self, command: Remint | Renew) -> list[_Entry]:
        return [self._leases[command.target.namespace, resource] for resource in command.target.resources]

    def _mint(self, namespace: str, floor: int) -> int | None:
        now_us = int(self.clock.wall() * 1_000_000)
        if floor > now_us + _YEAR_US or floor >= MAX_TOKEN:
            return None
        token = max(self._counters.get(namespace, 0) + 1, now_us, floor + 1)
        self._counters[namespace] = token
        return token if token <= MAX_TOKEN else None

    def _live(self, key: _Key) -> _Entry | None:
        entry = self._leases.get(key)
        return entry if entry is not None and entry.ends > self.clock.now() else None

    def _look(self, key: _Key) -> HeldBy | None:
        entry = self._live(key)
        if entry is None:
            return None
        left = entry.ends - self.clock.now()
        return HeldBy(key[1], entry.holder, entry.token, entry.label, entry.acquired_at, left)


class AsyncMemoryBackend:
    """The asyncio twin: the same dict behind coroutines. `sync` is the `MemoryBackend` underneath."""

    def __init__(self, clock: Clock | None = None, *, sync: MemoryBackend | None = None) -> None:
        self.sync = sync or MemoryBackend(clock)
        self.clock = self.sync.clock

    def target(self, namespace: str, resources: tuple[str, ...]) -> Target:
        return self.sync.target(namespace, resources)

    async def ask(self, command: Command, timeout: float) -> Reply:
        return self.sync.ask(command, timeout)

    async def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        return self.sync.ask_many(commands, timeout)

    async def rest(self, unused_for: float = 0.0) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""

    def after_fork(self) -> None:
        self.sync.after_fork()
