"""Leases in Redis: two thin clients around `wire` and `lines`, one for threads and one for asyncio.

Connections are made from the settings of the client you pass (address, TLS, credentials, unix socket,
protocol), kept between calls, and never taken out of its pool: a pool of any size will do, and the bounds on
our requests do not leak into yours. Every request is bounded here, and tried again by our own policy only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Sequence
from time import monotonic
from typing import Any

import redis
import redis.asyncio

from fencing.backends.base import Command, Reply, Target
from fencing.backends.lines import FRESH, TROUBLE, AsyncLine, Line, elsewhere, translate
from fencing.backends.wire import MAX_SHARDS, decode, pack, pack_join, pack_target
from fencing.errors import ConfigurationError, FencingError

Answer = Reply | FencingError
Exchange = tuple[bytes, int]
"""What to send, and how many replies it will have."""
Dialogue = Generator[Exchange, list[object], list[Answer]]


def _shown(reply: object) -> str:
    return reply.decode(errors="replace") if isinstance(reply, bytes) else repr(reply)


def _unknown_script(reply: object) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT")


class _Redis:
    """What the twins share: everything but sending and receiving."""

    def __init__(self, client: Any, shards: int) -> None:
        if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
            raise ConfigurationError(f"shards is a whole number from 1 to {MAX_SHARDS}, not {shards!r}")
        self._pool = client.connection_pool
        self._client = client  # kept alive: a client that is collected closes its pool
        self.shards = shards
        self._joined: set[str] = set()

    def target(self, namespace: str, resources: tuple[str, ...]) -> Target:
        return pack_target(namespace, resources, self.shards)

    def _dialogue(self, commands: Sequence[Command], replies: list[object] | None = None) -> Dialogue:
        """What to send and what the replies mean: join a namespace once, and send a script once if it is new.

        `replies`: what the server said already when the commands were sent.
        """
        for namespace in {command.target.namespace for command in commands} - self._joined:
            [stored] = yield pack_join(namespace, self.shards), 1
            if _unknown_script(stored):
                [stored] = yield pack_join(namespace, self.shards, whole=True), 1
            problem = self._agree(namespace, stored)
            if problem is not None:
                return [problem] * len(commands)
        if replies is None:
            replies = yield b"".join([pack(command) for command in commands]), len(commands)
        unknown = [at for at, reply in enumerate(replies) if _unknown_script(reply)]
        if unknown:
            # The first of each script carries its text; the server knows it when it comes to the next.
            told: set[type[Command]] = set()
            packed = []
            for at in unknown:
                kind = type(commands[at])
                packed.append(pack(commands[at], whole=kind not in told))
                told.add(kind)
            for at, reply in zip(unknown, (yield b"".join(packed), len(packed)), strict=True):
                replies[at] = reply
        return [self._meaning(command, reply) for command, reply in zip(commands, replies, strict=True)]

    def _agree(self, namespace: str, stored: object) -> FencingError | None:
        if isinstance(stored, FencingError):
            return stored
        if isinstance(stored, Exception):
            return translate(stored, sent=False)
        if stored != b"%d" % self.shards:
            return ConfigurationError(
                f"namespace {namespace!r} has {_shown(stored)} shards in Redis and {self.shards} here: "
                "the number is fixed by the first use of a namespace, use the same everywhere"
            )
        self._joined.add(namespace)
        return None

    @staticmethod
    def _meaning(command: Command, reply: object) -> Answer:
        if isinstance(reply, FencingError):
            return reply
        if isinstance(reply, Exception):
            return translate(reply, sent=True, about=f" about {command.target.name!r}")
        try:
            return decode(command, reply)
        except FencingError as error:
            return error


def _only(answers: Sequence[Answer]) -> Reply:
    [answer] = answers
    if isinstance(answer, FencingError):
        raise answer
    return answer


class RedisBackend(_Redis):
    """Leases in one Redis, for threads."""

    def __init__(self, client: redis.Redis, *, shards: int = 1) -> None:
        super().__init__(client, shards)
        self._idle: deque[Line] = deque()

    def ask(self, command: Command, timeout: float) -> Reply:
        replies: list[object] | None = None
        if command.target.namespace in self._joined:
            replies = []
            self._exchange(pack(command), replies, 1, timeout)
            if type(replies[0]) is list:
                return decode(command, replies[0])
        return _only(self._converse(self._dialogue((command,), replies), timeout))

    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Answer]:
        return self._converse(self._dialogue(commands), timeout) if commands else ()

    def _converse(self, dialogue: Dialogue, timeout: float) -> list[Answer]:
        try:
            packed, count = next(dialogue)
            while True:
                replies: list[object] = []
                self._exchange(packed, replies, count, timeout)
                packed, count = dialogue.send(replies)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _exchange(self, packed: bytes, replies: list[object], count: int, timeout: float) -> None:
        """One round trip. What went wrong stands in the place of the replies that did not come."""
        line: Line | None = None
        try:
            try:
                kept = self._idle.pop()
            except IndexError:
                line = Line.open(self._pool, timeout)
            else:
                line = kept
                if monotonic() - kept.used > FRESH and not kept.usable():
                    line = None
                    self._scrap(kept)
                    line = Line.open(self._pool, timeout)
            line.exchange(packed, replies, count, timeout)
        except TROUBLE as error:
            replies += [translate(error, sent=line is not None)] * (count - len(replies))
            self._scrap(line)
        except BaseException:
            # Safe because a connection whose reply was not read is never used again: it would hand this
            # reply to the next request.
            self._scrap(line)
            raise
        else:
            if isinstance(replies[-1], Exception) and elsewhere(replies[-1]):
                self._scrap(line)
            else:
                self._idle.append(line)

    def _scrap(self, line: Line | None) -> None:
        """Close a connection that failed, and the idle ones: what broke it may have broken them."""
        if line is not None:
            line.close()
        self.rest()

    def rest(self, unused_for: float = 0.0) -> None:
        before = monotonic() - unused_for
        for _ in range(len(self._idle)):
            try:
                line = self._idle.popleft()
            except IndexError:
                return
            if line.used <= before:
                line.close()
            else:
                self._idle.append(line)

    def close(self) -> None:
        self.rest()

    def after_fork(self) -> None:
        self._idle = deque()


class AsyncRedisBackend(_Redis):
    """Leases in one Redis, for asyncio. Its connections belong to the event loop that made them."""

    def __init__(self, client: redis.asyncio.Redis, *, shards: int = 1) -> None:
        super().__init__(client, shards)
        self._idle: deque[AsyncLine] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, command: Command, timeout: float) -> Reply:
        replies: list[object] | None = None
        if command.target.namespace in self._joined:
            replies = []
            await self._exchange(pack(command), replies, 1, timeout)
            if type(replies[0]) is list:
                return decode(command, replies[0])
        return _only(await self._converse(self._dialogue((command,), replies), timeout))

    async def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Answer]:
        return await self._converse(self._dialogue(commands), timeout) if commands else ()

    async def _converse(self, dialogue: Dialogue, timeout: float) -> list[Answer]:
        try:
            packed, count = next(dialogue)
            while True:
                replies: list[object] = []
                await self._exchange(packed, replies, count, timeout)
                packed, count = dialogue.send(replies)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _exchange(self, packed: bytes, replies: list[object], count: int, timeout: float) -> None:
        """One round trip. What went wrong stands in the place of the replies that did not come."""
        line: AsyncLine | None = None
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._idle = loop, deque()
        try:
            kept = self._idle.pop() if self._idle else None
            if kept is not None and kept.usable():
                line = kept
            else:
                await self._scrap(kept)
                line = await AsyncLine.open(self._pool, timeout)
            await line.exchange(packed, replies, count, timeout)
        except TROUBLE as error:
            replies += [translate(error, sent=line is not None)] * (count - len(replies))
            await self._scrap(line)
        except BaseException:
            # Safe because a connection whose reply was not read is never used again: it would hand this
            # reply to the next request.
            await self._scrap(line)
            raise
        else:
            if isinstance(replies[-1], Exception) and elsewhere(replies[-1]):
                await self._scrap(line)
            else:
                self._idle.append(line)

    async def _scrap(self, line: AsyncLine | None) -> None:
        """Close a connection that failed, and the idle ones: what broke it may have broken them."""
        if line is not None:
            await line.close()
        await self.rest()

    async def rest(self, unused_for: float = 0.0) -> None:
        before = monotonic() - unused_for
        for _ in range(len(self._idle)):
            line = self._idle.popleft()
            if line.used <= before:
                await line.close()
            else:
                self._idle.append(line)

    async def close(self) -> None:
        await self.rest()

    def after_fork(self) -> None:
        self._idle = deque()
