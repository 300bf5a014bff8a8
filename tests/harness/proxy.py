"""A TCP proxy in front of a server, that delays, cuts, swallows and loses when it is told to."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Self

from harness.resp import Splitter, command_name, is_push

CONTROL_LIMIT = 5.0  # seconds for a control to be carried out; it takes microseconds
CONNECT_LIMIT = 0.5  # seconds for the server to accept a connection
RETRY = 0.005  # seconds until a peer that does not read is tried again


@dataclass
class _Loss:
    """Which replies get lost, and how."""

    how: Literal["drop", "close"]
    count: int | None
    after: int
    command: bytes | None

    def takes(self, command: bytes | None) -> bool:
        """Whether the reply to `command` is one of them. To be asked once for each reply."""
        if self.count == 0 or (self.command is not None and command != self.command):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.count is not None:
            self.count -= 1
        return True


@dataclass(eq=False)
class _End:
    """One end of a link: its socket, and what is on its way there, each part with its time of arrival."""

    socket: socket.socket | None
    coming: deque[tuple[float, bytes]] = field(default_factory=deque)  # b"" closes the link
    said: Splitter = field(default_factory=Splitter)


@dataclass(eq=False)
class _Link:
    """A client's connection, and ours to the server on its behalf."""

    client: _End
    server: _End
    unanswered: deque[bytes] = field(default_factory=deque)  # the commands that await a reply
    hung_up: _End | None = None  # who closed its connection while the proxy was deaf


class Proxy:
    """A way to (`server_host`, `server_port`) that goes through `host`, `port`, as a context manager.

    Every control returns when it is in force: one thread owns all sockets, and the controls wait for it.
    `heal` ends whatever the others began. With ``resp=True`` the traffic is Redis's: `commands` lists what
    clients have sent (``b"EVALSHA"``), and replies are told apart however they were packed. Otherwise a
    "reply" is whatever arrives from the server in one piece. ::

        with Proxy(redis.host, redis.port) as proxy:
            client = Redis(host=proxy.host, port=proxy.port, socket_timeout=0.2)
            proxy.drop_replies(1, command=b"SET")
            client.set("a", 1)  # TimeoutError, but it is set
    """

    host = "127.0.0.1"

    def __init__(self, server_host: str, server_port: int, *, resp: bool = True) -> None:
        self.port = 0
        self.connections = 0  # made by clients, those that were cut off at once included
        self.commands: list[bytes] = []
        self.requests = 0  # the number of commands; without RESP, of pieces received from clients
        self.lost = 0  # replies that were dropped, or closed on
        self._server_address = (server_host, server_port)
        self._resp = resp
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._links: set[_Link] = set()
        self._delay = 0.0
        self._cut = self._deaf = self._closing = False
        self._loss: _Loss | None = None
        self._failure: Exception | None = None

    # Controls.

    def delay(self, seconds: float) -> None:
        """Everything takes this much longer from now on, in each direction, and keeps its order."""
        self._order(lambda: setattr(self, "_delay", seconds))

    def cut(self) -> None:
        """Reset all connections, and new ones as soon as they are made."""

        def do() -> None:
            self._cut = True
            self._abort_all()

        self._order(do)

    def deaf(self) -> None:
        """Swallow what either side sends, hanging up included. Clients can connect, and wait."""
        self._order(lambda: setattr(self, "_deaf", True))

    def drop_replies(self, count: int | None = None, after: int = 0, *, command: bytes | None = None) -> None:
        """Let requests through and lose the replies: the next `count` (None: all), `after` so many got by.

        With `command` only the replies to that one are lost and counted. The connections stay open, so
        a client that goes on after a timeout would take the next reply for the lost one.
        """
        self._order(lambda: setattr(self, "_loss", _Loss("drop", count, after, command)))

    def close_on_reply(self, count: int | None = 1, after: int = 0, *, command: bytes | None = None) -> None:
        """As `drop_replies`, but reset the client's connection when the server has answered."""
        self._order(lambda: setattr(self, "_loss", _Loss("close", count, after, command)))

    def heal(self) -> None:
        """Be a plain proxy again. What was delayed arrives at once; what was swallowed is gone."""

        def do() -> None:
            self._delay, self._cut, self._deaf, self._loss = 0.0, False, False, None
            for link in list(self._links):
                for end in (link.client, link.server):
                    end.coming = deque((0.0, part) for _, part in end.coming)
                if link.hung_up is not None:
                    self._hang_up(link, link.hung_up)
                elif link.server.socket is None:
                    self._connect(link)

        self._order(do)

    # What was seen.

    def clear(self) -> None:
        """Count from zero again."""
        with self._news:
            self.connections = self.requests = self.lost = 0
            self.commands.clear()

    def wait_for_commands(self, count: int, timeout: float = 5.0) -> list[bytes]:
        """The commands, as soon as clients have sent so many since `clear`. TimeoutError otherwise."""
        with self._news:
            if not self._news.wait_for(lambda: self.requests >= count, timeout):
                raise TimeoutError(f"{self.requests} of {count} in {timeout} s: {self.commands}")
            return list(self.commands)

    def wait_for_lost(self, count: int, timeout: float = 5.0) -> None:
        """Return as soon as so many replies got lost since `clear`. TimeoutError otherwise."""
        with self._news:
            if not self._news.wait_for(lambda: self.lost >= count, timeout):
                raise TimeoutError(f"{self.lost} of {count} replies lost in {timeout} s")

    # Life.

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((self.host, self.port))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):
            self._order(lambda: setattr(self, "_closing", True))
        self._thread.join(1.0)
        if self._failure is not None:
            raise self._failure

    def _order(self, do: Callable[[], None]) -> None:
        """Have the thread do it, and return when it is done."""
        done = threading.Event()
        self._orders.put((do, done))
        with contextlib.suppress(OSError):
            self._button.send(b"!")
        if not (self._thread.is_alive() and done.wait(CONTROL_LIMIT)):
            raise RuntimeError(f"the proxy is closed, or failed: {self._failure!r}")

    # From here on everything happens in the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._deliver()):
                    if key.fileobj.fileno() >= 0:  # else it was closed a moment ago
                        key.data()
        except Exception as failure:
            self._failure = failure
        finally:
            while not self._orders.empty():
                self._orders.get()[1].set()  # nobody waits for a thread that has ended
            self._abort_all()
            self._selector.close()
            for own in (self._listener, self._bell, self._button):
                own.close()

    def _obey(self) -> None:
        self._bell.recv(1)
        do, done = self._orders.get()
        try:
            do()
        finally:
            done.set()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        link = _Link(client=_End(accepted), server=_End(None))
        self._links.add(link)
        with self._news:
            self.connections += 1
            self._news.notify_all()
        self._open(link, link.client)
        if self._cut:
            self._abort(link)
        elif not self._deaf:
            self._connect(link)

    def _connect(self, link: _Link) -> None:
        try:
            link.server.socket = socket.create_connection(self._server_address, CONNECT_LIMIT)
        except OSError:
            self._abort(link)
        else:
            self._open(link, link.server)

    def _open(self, link: _Link, end: _End) -> None:
        end.socket.setblocking(False)
        end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(end.socket, selectors.EVENT_READ, partial(self._read, link, end))

    def _read(self, link: _Link, end: _End) -> None:
        try:
            data = end.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            if not self._deaf:
                self._abort(link)
                return
            data = b""
        if not data:
            self._hang_up(link, end)
        elif end is link.client:
            self._from_client(link, data)
        else:
            self._from_server(link, data)

    def _from_client(self, link: _Link, data: bytes) -> None:
        commands = [command_name(message) for message in link.client.said.feed(data)] if self._resp else []
        if not self._deaf:
            link.unanswered.extend(commands)
            self._send(link.server, data)
        with self._news:
            self.commands += commands
            self.requests += len(commands) if self._resp else 1
            self._news.notify_all()

    def _from_server(self, link: _Link, data: bytes) -> None:
        for reply in link.server.said.feed(data) if self._resp else [data]:
            unasked = self._resp and is_push(reply)
            command = link.unanswered.popleft() if link.unanswered and not unasked else None
            if self._deaf:
                continue
            if unasked or self._loss is None or not self._loss.takes(command):
                self._send(link.client, reply)
                continue
            if self._loss.how == "close":
                self._abort(link)
            with self._news:
                self.lost += 1
                self._news.notify_all()
            if link not in self._links:
                return

    def _send(self, end: _End, data: bytes) -> None:
        arrival = time.monotonic() + self._delay
        if end.coming:
            arrival = max(arrival, end.coming[-1][0])  # never before what was sent earlier
        end.coming.append((arrival, data))

    def _hang_up(self, link: _Link, end: _End) -> None:
        """One end has closed its connection: let the other one know, after what is on its way there."""
        for each in (link.client, link.server):
            if each.socket is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(each.socket)
        link.hung_up = end
        other = link.server if end is link.client else link.client
        if other.socket is None:
            self._close(link)
        elif not self._deaf:
            self._send(other, b"")

    def _deliver(self) -> float | None:
        """Hand over what is due. The seconds until there will be more to do, if that is known."""
        waits = []
        for link in list(self._links):
            for end in (link.client, link.server):
                try:
                    waits += self._deliver_to(link, end)
                except BlockingIOError:
                    waits.append(RETRY)
                except OSError:
                    self._abort(link)
        return max(0.0, min(waits)) if waits else None

    def _deliver_to(self, link: _Link, end: _End) -> list[float]:
        while end.coming and link in self._links:
            arrival, data = end.coming[0]
            if (wait := arrival - time.monotonic()) > 0:
                return [wait]
            if not data:
                self._close(link)
                break
            sent = end.socket.send(data)
            end.coming.popleft()
            if sent < len(data):
                end.coming.appendleft((arrival, data[sent:]))
        return []

    def _abort_all(self) -> None:
        for link in list(self._links):
            self._abort(link)

    def _abort(self, link: _Link) -> None:
        """Close both connections so that the peers see a reset."""
        for end in (link.client, link.server):
            if end.socket is not None:
                with contextlib.suppress(OSError):
                    end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(link)

    def _close(self, link: _Link) -> None:
        self._links.discard(link)
        for end in (link.client, link.server):
            if end.socket is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(end.socket)
                end.socket.close()
