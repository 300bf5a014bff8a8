"""Connections to Redis, and nothing above them: a socket or a transport, and a parser.

redis-py opens them, from the settings of the user's client, and greets the server; then we speak ourselves. Half
of what a command costs in redis-py lies between its client and the socket.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import hiredis
import redis.exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError
from redis.retry import Retry

from fencing.backends.base import CALL_TIMEOUT
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

TROUBLE = (RedisError, OSError, UnicodeError, hiredis.HiredisError)
"""What may be raised while connecting and speaking. (asyncio's TimeoutError is an OSError.)"""


def _settings(pool: Any, **own: Any) -> dict[str, Any]:
    kept = {key: value for key, value in pool.connection_kwargs.items() if not key.startswith(_POOLED)}
    own |= {"decode_responses": False, "health_check_interval": 0}
    own |= {"retry_on_timeout": False, "retry_on_error": []}
    return kept | own


def translate(error: BaseException, *, sent: bool, about: str = "") -> FencingError:
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


def elsewhere(error: Exception) -> bool:
    """Whether the server says that it is not the one to ask (any more): connect anew, perhaps to another."""
    text = str(error)
    return "READONLY" in text or text.startswith(("LOADING", "MASTERDOWN"))


def _poller(sock: socket.socket) -> Callable[[float], object]:
    """Waits for so many milliseconds until there is something to read; false when there is not."""
    if not hasattr(select, "poll"):
        return lambda _: True  # the socket's own timeout bounds it
    poll = select.poll()  # select() knows only the first 1024 files of a process
    poll.register(sock, select.POLLIN)
    return poll.poll


class Line:
    """A connection that redis-py has opened and greeted; then its socket and a parser, and nothing between.

    Half of what a command costs in redis-py is between those two.
    """

    __slots__ = ("_connection", "_pending", "_poll", "_reader", "_socket", "used")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._socket.settimeout(None if hasattr(select, "poll") else CALL_TIMEOUT)
        # Waiting by one poll() a reply. Python's own socket timeout polls twice, and the kernel's (SO_RCVTIMEO)
        # starts anew at each signal.
        self._poll: Callable[[float], object] = _poller(self._socket)
        self._pending = getattr(self._socket, "pending", None)  # TLS may have read more than it gave
        self.used = 0.0

    @classmethod
    def open(cls, pool: Any, timeout: float) -> Line:
        """A new one, with the settings of the pool's connections, but for our own bounds."""
        step = timeout / 3  # greeting the server takes a few round trips
        bounds = {"socket_timeout": step, "socket_connect_timeout": step}
        connection = pool.connection_class(**_settings(pool, **bounds, retry=Retry(NoBackoff(), 0)))
        connection.connect()
        return cls(connection)

    def exchange(self, packed: bytes, replies: list[object], count: int, timeout: float) -> None:
        """Send, and append `count` replies; error replies are appended like others."""
        sock, reader = self._socket, self._reader
        sock.sendall(packed)
        ends = 0.0
        left = timeout
        size = 4096 if count == 1 else 65536  # a buffer of that size is made for each call
        while True:
            if (self._pending is None or not self._pending()) and not self._poll(left * 1000):
                raise TimeoutError("no answer")
            data = sock.recv(size)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                if type(reply) in _PUSHED:
                    continue
                replies.append(reply)
                if len(replies) == count:
                    if reader.has_data():
                        raise ConnectionError("the server said more than it was asked")
                    self.used = monotonic()
                    return
            now = monotonic()
            ends = ends or now + timeout
            left = ends - now
            if left <= 0:
                raise TimeoutError("the replies came too slowly")

    def usable(self) -> bool:
        """Whether it may be used again: a server that went away meanwhile has made it readable."""
        return not self._poll(0)

    def close(self) -> None:
        self._connection.disconnect()


class AsyncLine(asyncio.Protocol):
    """The asyncio twin of `Line`: the transport of a connection and a parser, and no streams between."""

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

    @classmethod
    async def open(cls, pool: Any, timeout: float) -> AsyncLine:
        """A new one, with the settings of the pool's connections, but for our own bounds."""
        bounds = {"socket_timeout": None, "socket_connect_timeout": None}
        connection = pool.connection_class(**_settings(pool, **bounds, retry=AsyncRetry(NoBackoff(), 0)))
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return cls(connection)

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
        if len(replies) > self._wanted or (len(replies) == self._wanted and parser.has_data()):
            self._fail(ConnectionError("the server said more than it was asked"))
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
