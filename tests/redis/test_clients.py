"""Any client will do: its protocol, address, credentials and encryption are ours too, its habits are not."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import os
import resource
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from contract.subjects import LONG, BackgroundLoop, Subject
from harness.proxy import Proxy
from harness.sides import Side

from fencing.backends.base import Busy, Done, Granted, NotHeld, Peek
from fencing.backends.redis import RedisBackend
from fencing.embedded import RedisServer
from fencing.errors import BackendUnavailable, ConfigurationError, FencingError

MakeSubject = Callable[..., Subject]


def live_a_whole_life(subject: Subject) -> None:
    """Everything that can be asked of a backend, with every kind of answer."""
    taken = subject.take("invoice:42", "invoice:43", label="größer")
    assert subject.acquire("invoice:42", "invoice:43", holder=taken.holder) == Granted(taken.token)
    busy = subject.acquire("invoice:43")
    assert isinstance(busy, Busy)
    assert (busy.held_by.holder, busy.held_by.label) == (taken.holder, "größer")
    assert subject.renew("invoice:42", "invoice:43", holder=taken.holder) == Done()
    reminted = subject.remint("invoice:42", "invoice:43", holder=taken.holder, floor=taken.token)
    assert isinstance(reminted, Granted)
    assert reminted.token > taken.token
    assert subject.peek("invoice:42").token == reminted.token
    replies = subject.ask_many([Peek(taken.target), Peek(subject.target("free"))])
    assert [reply.held_by and reply.held_by.holder for reply in replies] == [taken.holder, None]
    assert isinstance(subject.release("invoice:42", holder=subject.fresh_holder()), NotHeld)
    assert subject.release("invoice:42", "invoice:43", holder=taken.holder) == Done()
    lost = subject.abandoned("invoice:42")
    [orphan] = subject.take("invoice:42", note=False).reply.orphans
    assert orphan.previous.holder == lost.holder


@pytest.mark.parametrize("decode_responses", [False, True], ids=["bytes", "decoded"])
@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_either_protocol_with_or_without_decoding(
    make_subject: MakeSubject, server: RedisServer, protocol: int, decode_responses: bool
) -> None:
    live_a_whole_life(make_subject(server.url, protocol=protocol, decode_responses=decode_responses))


def test_a_client_as_it_comes(make_subject: MakeSubject, server: RedisServer) -> None:
    live_a_whole_life(make_subject(server.url))


def test_a_client_with_another_encoding(make_subject: MakeSubject, server: RedisServer) -> None:
    live_a_whole_life(make_subject(server.url, encoding="latin-1", decode_responses=True))


def test_two_clients_that_speak_differently_meet(make_subject: MakeSubject, server: RedisServer) -> None:
    taken = make_subject(server.url, protocol=2, encoding="latin-1").take("Köln", label="größer")
    held_by = make_subject(server.url, protocol=3, decode_responses=True).peek("Köln")

    assert held_by is not None
    assert (held_by.resource, held_by.holder, held_by.label) == ("Köln", taken.holder, "größer")


# Addresses.


def test_a_unix_socket(make_subject: MakeSubject, server: RedisServer) -> None:
    live_a_whole_life(make_subject(f"unix://{server.unix_socket}"))


def test_a_database_by_its_number(make_subject: MakeSubject, server: RedisServer, admin: redis.Redis) -> None:
    subject = make_subject(f"redis://{server.host}:{server.port}/3")
    live_a_whole_life(subject)

    assert admin.dbsize() == 0
    admin.select(3)
    assert admin.exists(f"fencing:1:{{{subject.namespace}/0}}:counter")


def test_a_database_that_does_not_exist_is_refused(make_subject: MakeSubject, server: RedisServer) -> None:
    with pytest.raises(FencingError, match="DB index is out of range"):
        make_subject(f"redis://{server.host}:{server.port}/99").acquire("invoice:42")


def test_a_server_that_is_not_there_is_unavailable_and_was_sent_nothing(make_subject: MakeSubject) -> None:
    with pytest.raises(BackendUnavailable) as failure:
        make_subject("redis://127.0.0.1:1/0").acquire("invoice:42")
    assert not failure.value.sent


# Names and credentials.


def test_the_name_of_the_client_is_kept(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    make_subject(server.url, client_name="billing-worker").take("invoice:42")

    assert "billing-worker" in [client["name"] for client in admin.client_list()]


@pytest.fixture
def password(admin: redis.Redis) -> Iterator[str]:
    """A server that wants a password of everybody."""
    admin.config_set("requirepass", "secret")
    yield "secret"
    admin.config_set("requirepass", "")


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_a_password(make_subject: MakeSubject, server: RedisServer, password: str, protocol: int) -> None:
    live_a_whole_life(make_subject(server.url, password=password, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_a_wrong_password_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, password: str, protocol: int
) -> None:
    with pytest.raises(ConfigurationError):
        make_subject(server.url, password="wrong", protocol=protocol).acquire("invoice:42")


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_a_missing_password_is_a_matter_of_configuration(
    make_subject: MakeSubject, server: RedisServer, password: str, protocol: int
) -> None:
    with pytest.raises(ConfigurationError):
        make_subject(server.url, protocol=protocol).acquire("invoice:42")


def test_a_missing_password_is_noticed_when_nothing_was_said_while_connecting(
    make_subject: MakeSubject, server: RedisServer, password: str
) -> None:
    known = inspect.signature(redis.Redis).parameters
    silent = {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}

    with pytest.raises(ConfigurationError, match="NOAUTH"):
        make_subject(server.url, protocol=2, **silent).acquire("invoice:42")


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_a_user_with_a_password(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis, protocol: int
) -> None:
    admin.acl_setuser("worker", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"])

    live_a_whole_life(make_subject(server.url, username="worker", password="pw", protocol=protocol))


def test_a_provider_of_credentials(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    admin.acl_setuser("worker", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"])
    provider = redis.UsernamePasswordCredentialProvider("worker", "pw")

    live_a_whole_life(make_subject(server.url, credential_provider=provider))


def test_a_change_of_the_password_does_not_disturb_who_is_connected(
    make_subject: MakeSubject, server: RedisServer, admin: redis.Redis
) -> None:
    subject = make_subject(server.url)
    taken = subject.take("invoice:42")
    admin.config_set("requirepass", "secret")
    try:
        assert subject.renew("invoice:42", holder=taken.holder) == Done()
    finally:
        admin.config_set("requirepass", "")


# Encryption. The server out of the wheel has none, so that something else ends it in front of the server.


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that vouches for itself, with its key in the same file."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate


@pytest.fixture
def tls_url(line: Proxy, certificate: Path, background_loop: BackgroundLoop) -> Iterator[str]:
    """The way to the server by TLS, and then by the `line`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        server_reader, server_writer = await asyncio.open_connection(line.host, line.port)
        writers.update((writer, server_writer))
        await asyncio.gather(forward(reader, server_writer), forward(server_reader, writer))

    async def stop() -> None:
        terminator.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks)

    terminator = background_loop.finish(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    yield f"rediss://localhost:{terminator.sockets[0].getsockname()[1]}/0"
    background_loop.finish(stop())


@pytest.mark.parametrize("protocol", [2, 3], ids=["resp2", "resp3"])
def test_tls(make_subject: MakeSubject, tls_url: str, certificate: Path, protocol: int) -> None:
    live_a_whole_life(make_subject(tls_url, ssl_ca_certs=str(certificate), protocol=protocol))


def test_a_connection_by_tls_is_kept(
    make_subject: MakeSubject, tls_url: str, certificate: Path, line: Proxy
) -> None:
    subject = make_subject(tls_url, ssl_ca_certs=str(certificate))
    for number in range(20):
        subject.take(f"invoice:{number}")

    assert line.connections == 1


def test_a_server_that_falls_silent_behind_tls_is_given_up_in_time(
    make_subject: MakeSubject, tls_url: str, certificate: Path, line: Proxy
) -> None:
    subject = make_subject(tls_url, ssl_ca_certs=str(certificate))
    taken = subject.take("invoice:42")
    line.deaf()
    before = subject.now()

    with pytest.raises(BackendUnavailable, match="too long") as failure:
        subject.ask(Peek(taken.target), timeout=0.1)
    assert failure.value.sent
    assert subject.now() - before < 1.0


def test_a_certificate_that_nobody_vouches_for_is_refused(make_subject: MakeSubject, tls_url: str) -> None:
    with pytest.raises(BackendUnavailable, match="certificate verify failed") as failure:
        make_subject(tls_url).acquire("invoice:42")
    assert not failure.value.sent


# The habits of a client that are not ours.


def test_the_retries_of_the_client_are_not_ours(
    make_subject: MakeSubject, line: Proxy, line_url: str
) -> None:
    subject = make_subject(line_url, retry_on_error=[redis.ConnectionError])
    subject.take("invoice:42")
    line.cut()
    line.clear()

    with pytest.raises(BackendUnavailable):
        subject.acquire("invoice:43")
    assert line.connections <= 1


def test_the_timeout_of_the_client_is_not_ours(make_subject: MakeSubject, line: Proxy, line_url: str) -> None:
    subject = make_subject(line_url, socket_timeout=0.02, socket_connect_timeout=0.02)
    line.delay(0.02)

    assert isinstance(subject.acquire("invoice:42"), Granted)


def test_a_client_without_a_timeout_is_bounded_by_ours(
    make_subject: MakeSubject, line: Proxy, line_url: str
) -> None:
    subject = make_subject(line_url, socket_timeout=None, socket_connect_timeout=None)
    line.deaf()
    before = subject.now()

    with pytest.raises(BackendUnavailable):
        subject.ask(Peek(subject.target("invoice:42")), timeout=0.1)
    assert subject.now() - before < 1.0


def test_a_connection_that_the_server_has_closed_is_replaced(
    make_side: Callable[..., Side], server: RedisServer, admin: redis.Redis
) -> None:
    side = make_side(server.url)
    lease = side.acquire("invoice:42", ttl=LONG)
    admin.client_kill_filter(_type="normal", skipme=True)
    side.renew(side.acquire("invoice:43"))
    admin.client_kill_filter(_type="normal", skipme=True)
    side.release(lease)

    assert side.peek("invoice:42") is None


def test_a_client_that_was_closed_is_no_hindrance(server: RedisServer, namespace: str) -> None:
    client = redis.Redis.from_url(server.url)
    backend = RedisBackend(client)
    client.close()

    assert backend.ask(Peek(backend.target(namespace, ("invoice:42",))), 2.0).held_by is None
    backend.close()


@pytest.fixture
def more_than_a_thousand_files() -> Iterator[None]:
    """So many files are open that the next ones get numbers of 1024 and above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"not more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with contextlib.ExitStack() as opened:
        null = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, null)
        while (number := fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 0)) < 1024:
            opened.callback(os.close, number)
        opened.callback(os.close, number)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("more_than_a_thousand_files")
def test_a_process_with_more_than_a_thousand_open_files(
    sync_subject: MakeSubject, server: RedisServer
) -> None:
    subject = sync_subject(server.url)
    taken = subject.take("invoice:42")
    for line in subject.backend._idle:
        line.used = 0.0  # long ago, so that it is looked at before it is used again

    assert subject.release("invoice:42", holder=taken.holder) == Done()


@pytest.mark.usefixtures("more_than_a_thousand_files")
def test_an_asynchronous_process_with_more_than_a_thousand_open_files(
    async_subject: MakeSubject, server: RedisServer
) -> None:
    subject = async_subject(server.url)
    taken = subject.take("invoice:42")

    assert subject.release("invoice:42", holder=taken.holder) == Done()
