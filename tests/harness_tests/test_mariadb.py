"""The MariaDB of this machine does as a server of ours what the servers out of the wheels do."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pymysql
import pytest
from harness.mariadb import MariaDBServer, empty_database
from harness.plugin import do_without, started
from harness.servers import Installed
from sqlalchemy import create_engine, make_url

from fencing.embedded import ServerFailed
from fencing.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_mariadb() -> Iterator[Callable[..., MariaDBServer]]:
    with contextlib.ExitStack() as servers:
        yield lambda **options: started(servers, MariaDBServer(**options))


@pytest.fixture
def scratch(monkeypatch) -> Iterator[Path]:
    """Where private directories go, during this test."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)  # not only for its owner: root's MariaDB runs as somebody else
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def connect(url: str, **options: object) -> pymysql.Connection:
    parts = make_url(url)
    address = {"host": parts.host, "port": parts.port, "user": parts.username, "password": parts.password}
    return pymysql.connect(
        **{**address, "database": parts.database, "charset": "utf8mb4", "autocommit": True, **options}
    )


def query(url: str, statement: str, **options: object) -> list[tuple[object, ...]]:
    with (
        contextlib.closing(connect(url, **options)) as connection,
        contextlib.closing(connection.cursor()) as cursor,
    ):
        cursor.execute(statement)
        return list(cursor.fetchall())


def alive_in_group(leader: int) -> list[int]:
    """The processes of a group, other than dead ones nobody has waited for."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended while we were reading
            state, _, group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(file.parent.name))
    return found


# The server


def test_mariadb_serves_by_its_url_and_leaves_nothing_behind(scratch, make_mariadb):
    server = make_mariadb()
    assert server.directory.parent == scratch
    engine = create_engine(server.url)
    with engine.connect() as connection:
        said = connection.exec_driver_sql("select @@version, @@character_set_database, '🔒'").one()
    engine.dispose()
    assert said[0].startswith(server.installed_version())
    assert tuple(said[1:]) == ("utf8mb4", "🔒")

    pid = server.pid
    server.stop()
    assert not server.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(scratch.iterdir()) == []


def test_mariadb_listens_on_this_machine_only_and_wants_the_password(make_mariadb):
    server = make_mariadb()
    assert query(server.url, "select @@bind_address, @@skip_networking") == [("127.0.0.1", 0)]
    for stranger in ({"password": "guessed"}, {"user": "root", "password": ""}, {"user": "", "password": ""}):
        with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
            connect(server.url, **stranger)


def test_mariadb_keeps_an_acknowledged_row_over_pause_kill_and_restart(make_mariadb):
    server = make_mariadb(settings={"innodb-flush-log-at-trx-commit": "1"})
    url = server.url
    query(url, "create table kept (id int primary key)")
    query(url, "insert into kept values (1)")

    server.pause()
    answer: list[object] = []
    asker = threading.Thread(target=lambda: answer.extend(query(url, "select id from kept")))
    asker.start()
    asker.join(0.1)
    assert answer == []
    server.resume()
    asker.join(5)
    assert answer == [(1,)]

    server.kill()
    with pytest.raises(pymysql.err.OperationalError, match="refused"):
        connect(url)
    server.start()
    assert (server.url, query(url, "select id from kept")) == (url, [(1,)])
    server.restart()
    assert (server.url, query(url, "select id from kept")) == (url, [(1,)])


def test_a_mariadb_that_cannot_start_says_why_and_leaves_nothing_behind(scratch, make_mariadb):
    with pytest.raises(ServerFailed, match="nonsense"):
        make_mariadb(settings={"nonsense": "1"})
    assert list(scratch.iterdir()) == []


def test_a_mariadb_that_cannot_be_installed_says_why_and_leaves_nothing_behind(
    scratch, make_mariadb, monkeypatch
):
    monkeypatch.setattr(MariaDBServer, "_small", lambda server: {"datadir": "/dev/null/nowhere"})
    with pytest.raises(ServerFailed, match=r"(?s)mariadb-install-db in .* failed:\n.*/dev/null/nowhere"):
        make_mariadb()
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_installation_that_takes_too_long_is_ended_with_all_its_processes(
    scratch, make_mariadb, monkeypatch
):
    begun: list[int] = []
    popen = MariaDBServer._popen

    def noted(server: MariaDBServer, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        process = popen(server, command, **options)
        begun.append(process.pid)
        return process

    monkeypatch.setattr(MariaDBServer, "_popen", noted)
    monkeypatch.setattr("harness.mariadb.INSTALL_LIMIT", 0.1)
    with pytest.raises(ServerFailed, match=r"mariadb-install-db took more than 0\.1 s"):
        make_mariadb()
    assert alive_in_group(begun[0]) == []
    assert list(scratch.iterdir()) == []


def test_another_port_is_tried_when_the_first_was_taken_meanwhile(make_mariadb, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as rival:
        taken = rival.getsockname()[1]
        reserve = MariaDBServer._reserve_port
        attempts: list[int] = []

        def too_late(server: MariaDBServer) -> None:
            attempts.append(server.port)
            if len(attempts) == 1:
                server.port = taken
            else:
                reserve(server)

        monkeypatch.setattr(MariaDBServer, "_reserve_port", too_late)
        assert make_mariadb().port != taken
    assert len(attempts) == 2


def test_a_missing_mariadb_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    for ask in (MariaDBServer().start, MariaDBServer.installed_version):
        with pytest.raises(ConfigurationError, match="apt-get install mariadb-server"):
            ask()


def test_mariadb_is_found_by_those_who_have_no_sbin_on_their_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        assert MariaDBServer.program().name == "mariadbd"
    except ConfigurationError as reason:
        do_without(reason)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it already")
def test_mariadb_works_for_a_plain_user(make_mariadb):
    """Who may not even be able to run this Python: so it is loaded first."""
    user = pwd.getpwnam("nobody")
    assert os.stat(make_mariadb().directory).st_uid == user.pw_uid
    program = f"""
import os
import encodings.idna
from harness.mariadb import MariaDBServer

os.setgroups([])
os.setgid({user.pw_gid})
os.setuid({user.pw_uid})
with MariaDBServer() as server:
    server.kill()
    server.start()
    print("fine")
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (ended.stdout, ended.stderr) == ("fine\n", "")


# Sharing, and the fixtures


def test_the_shared_mariadb_starts_when_it_is_first_asked_for():
    try:
        source = Installed()
    except ConfigurationError as reason:
        do_without(reason)
    assert not source._server.running
    try:
        url = source.start()
        assert source.start() == url
        assert query(url, "select @@max_connections") == [(200,)]
    finally:
        source.stop()
    assert not source._server.running


@pytest.mark.parametrize("attempt", [1, 2])
def test_each_test_gets_an_empty_mariadb_database(mariadb_database_url, attempt):
    assert make_url(mariadb_database_url).drivername == "mysql+pymysql"
    query(mariadb_database_url, "create table only_here (id int)")


def test_a_database_is_dropped_even_if_a_transaction_was_left_open_in_it(mariadb_url):
    with empty_database(mariadb_url) as url:
        query(url, "create table used (id int primary key)")
        forgotten = connect(url, autocommit=False)
        with contextlib.closing(forgotten.cursor()) as cursor:
            cursor.execute("insert into used values (1)")
    with contextlib.closing(forgotten), pytest.raises(pymysql.err.OperationalError):
        forgotten.ping(reconnect=False)
    name = make_url(url).database
    assert query(mariadb_url, f"show databases like '{name}'") == []
