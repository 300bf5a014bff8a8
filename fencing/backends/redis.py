"""Leases in Redis: two thin clients around `wire`, one for threads and one for asyncio.

Connections are made from the settings of the client you pass (address, TLS, credentials, unix socket,
protocol), kept between calls, and never taken out of its pool: a pool of any size will do, and the bounds on
our requests do not leak into yours. Every request is bounded here, and tried again by our own policy only.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Generator, Sequence
from time import monotonic
from typing import Any

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError
from redis.retry import Retry

from fencing.backends.base import Command, Reply, Target
from fencing.backends.wire import MAX_SHARDS, decode, pack, pack_join, pack_target
from fencing.errors import BackendUnavailable, ConfigurationError, FencingError

FRESH = 1.0
"""Seconds for which a kept connection is used again without a look whether the server has closed it."""

# Errors that no retry will get over, by a word of the server's message.
_FINAL = (
    "NOPERM",
    "NOAUTH",
    "WRONGPASS",
    "WRONGTYPE",
    "can't run",
    "can't access",
    "not an integer",
    "out of range",
)

# Settings that tie a connection to its pool, its cache or its maintenance: not for a connection of our own.
_POOLED = ("maint", "orig_", "oss_", "cache", "himport")

_PUSHED = (hiredis.PushNotification,) if hasattr(hiredis, "PushNotification") else ()  # since hiredis 3.2
_MORE = object()
_TIMEOUTS = (TimeoutError, BlockingIOError, redis.exceptions.TimeoutError)

Answer = Reply | FencingError
Exchange = tuple[bytes, int]
"""What to send, and how many replies it will have."""
Dialogue = Generator[Exchange, list[object], list[Answer]]


def _settings(pool: Any, **own: Any) -> dict[str, Any]:
    kept = {key: value for key, value in pool.connection_kwargs.items() if not key.startswith(_POOLED)}
    own |= {"decode_responses": False, "health_check_interval": 0}
    own |= {"retry_on_timeout": False, "retry_on_error": []}
    return kept | own


def _translate(error: BaseException, *, sent: bool, about: str = "") -> FencingError:
    """The error a caller can act on."""
    text = "it took too long" if isinstance(error, _TIMEOUTS) else str(error) or repr(error)
    final = isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError))
    if final or any(word in text for word in _FINAL):
        if "NOAUTH" in text or "already authenticated" in text:
            text = f"it wants a password, and this client has none ({text})"
        return ConfigurationError(f"Redis refuses this client{about}, now and later: {text}")
    if not sent:
        return BackendUnavailable(f"Redis is unreachable: {text}", sent=False)
    return BackendUnavailable(f"Redis failed, or did not answer: {text}", sent=True)


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
            return _translate(stored, sent=False)
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
            return _translate(reply, sent=True, about=f" about {command.target.name!r}")
        try:
            return decode(command, reply)
        except FencingError as error:
            return error


def _only(answers: Sequence[Answer]) -> Reply:
    [answer] = answers
    if isinstance(answer, FencingError):
        raise answer
    return answer


def _elsewhere(error: Exception) -> bool:
    """Whether the server says that it is not the one to ask (any more): connect anew, perhaps to another."""
    text = str(error)
    return "READONLY" in text or text.startswith(("LOADING", "MASTERDOWN"))


def _readable(sock: socket.socket) -> bool:
    if hasattr(select, "poll"):  # select() knows only the first 1024 files of a process
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


class _Line:
    """A connection that redis-py has opened and greeted; then its socket and a parser, and nothing between.

    Half of what a command costs in redis-py is between those two.
    """

    __slots__ = ("_connection", "_reader", "_socket", "_timeout", "used")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._timeout = -1.0
        self.used = 0.0

    def exchange(self, packed: bytes, replies: list[object], count: int, timeout: float) -> None:
        """Send, and append `count` replies; error replies are appended like others."""
        sock, reader = self._socket, self._reader
        if timeout != self._timeout:
            self._bound(timeout)
        sock.sendall(packed)
        ends = 0.0
        while True:
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                if type(reply) not in _PUSHED:
                    replies.append(reply)
            now = monotonic()
            if len(replies) == count:
                self.used = now
                return
            ends = ends or now + timeout
            if now > ends:
                raise TimeoutError("the replies came too slowly")

    def _bound(self, timeout: float) -> None:
        """Bound every send and receive. Left to the kernel where it can: Python's own bound polls each time."""
        if type(self._socket) is socket.socket and os.name == "posix":
            self._socket.settimeout(None)
            seconds, rest = divmod(int(timeout * 1_000_000), 1_000_000)
            timeval = struct.pack("ll", seconds, rest)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        else:
            self._socket.settimeout(timeout)
        self._timeout = timeout

    def usable(self) -> bool:
        """Whether it may be used again: a server that went away meanwhile has made it readable."""
        return monotonic() - self.used < FRESH or not _readable(self._socket)

    def close(self) -> None:
        self._connection.disconnect()


class RedisBackend(_Redis):
    """Leases in one Redis, for threads."""

    def __init__(self, client: redis.Redis, *, shards: int = 1) -> None:
        super().__init__(client, shards)
        self._idle: deque[_Line] = deque()

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
        line: _Line | None = None
        try:
            try:
                kept = self._idle.pop()
            except IndexError:
                line = self._connect(timeout)
            else:
                if kept.usable():
                    line = kept
                else:
                    self._scrap(kept)
                    line = self._connect(timeout)
            line.exchange(packed, replies, count, timeout)
        except (RedisError, OSError, hiredis.HiredisError) as error:
            replies += [_translate(error, sent=line is not None)] * (count - len(replies))
            self._scrap(line)
        except BaseException:
            # Safe because a connection whose reply was not read is never used again: it would hand this
            # reply to the next request.
            self._scrap(line)
            raise
        else:
            if isinstance(replies[-1], Exception) and _elsewhere(replies[-1]):
                self._scrap(line)
            else:
                self._idle.append(line)

    def _connect(self, timeout: float) -> _Line:
        connection = self._pool.connection_class(
            **_settings(
                self._pool,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
            )
        )
        connection.connect()
        return _Line(connection)

    def _scrap(self, line: _Line | None) -> None:
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


class _AsyncLine(asyncio.Protocol):
    """The asyncio twin of `_Line`: the transport of a connection and a parser, and no streams between."""

    __slots__ = (
        "_connection",
        "_loop",
        "_lost",
        "_parser",
        "_replies",
        "_transport",
        "_waiter",
        "_wanted",
        "used",
    )

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._parser = hiredis.Reader(notEnoughData=_MORE)
        self._replies: list[object] = []
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self.used = 0.0
        self._transport: asyncio.Transport = connection._writer.transport
        self._transport.set_protocol(self)

    async def exchange(self, packed: bytes, replies: list[object], count: int, timeout: float) -> None:
        """Send, and append `count` replies; error replies are appended like others."""
        loop = self._loop
        self._replies, self._wanted = replies, count
        waiter = self._waiter = loop.create_future()
        guard = loop.call_later(timeout, self._too_late)
        try:
            self._transport.write(packed)
            await waiter
        finally:
            guard.cancel()
            self._waiter = None
            self.used = monotonic()

    def data_received(self, data: bytes) -> None:
        replies, parser = self._replies, self._parser
        try:
            parser.feed(data)
            while (reply := parser.gets()) is not _MORE:
                if type(reply) not in _PUSHED:
                    replies.append(reply)
        except hiredis.HiredisError as error:
            self._fail(error)
        if len(replies) >= self._wanted and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._fail(error or ConnectionError("the server closed the connection"))

    def _too_late(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def usable(self) -> bool:
        """Whether it may be used again: the event loop has told us of one that the server closed."""
        return not self._lost and not self._transport.is_closing()

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


class AsyncRedisBackend(_Redis):
    """Leases in one Redis, for asyncio. Its connections belong to the event loop that made them."""

    def __init__(self, client: redis.asyncio.Redis, *, shards: int = 1) -> None:
        super().__init__(client, shards)
        self._idle: deque[_AsyncLine] = deque()
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
        line: _AsyncLine | None = None
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._idle = loop, deque()
        try:
            kept = self._idle.pop() if self._idle else None
            if kept is not None and kept.usable():
                line = kept
            else:
                await self._scrap(kept)
                line = await self._connect(timeout)
            await line.exchange(packed, replies, count, timeout)
        except (RedisError, OSError, hiredis.HiredisError) as error:  # TimeoutError is an OSError
            replies += [_translate(error, sent=line is not None)] * (count - len(replies))
            await self._scrap(line)
        except BaseException:
            # Safe because a connection whose reply was not read is never used again: it would hand this
            # reply to the next request.
            await self._scrap(line)
            raise
        else:
            if isinstance(replies[-1], Exception) and _elsewhere(replies[-1]):
                await self._scrap(line)
            else:
                self._idle.append(line)

    async def _connect(self, timeout: float) -> _AsyncLine:
        connection = self._pool.connection_class(
            **_settings(
                self._pool, socket_timeout=None, socket_connect_timeout=None, retry=AsyncRetry(NoBackoff(), 0)
            )
        )
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return _AsyncLine(connection)

    async def _scrap(self, line: _AsyncLine | None) -> None:
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
