"""A server in Docker, kept by a process of its own: ``python -m harness.containers redis``.

The process prints the server's url and removes the container when its standard input ends, however the
tests ended. Whatever Docker or testcontainers get up to (hang, warn, leave sockets open) stays in there.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

IMAGES = {"redis": "redis:7.4-alpine", "postgres": "postgres:18-alpine"}
STOP_LIMIT = 15.0  # seconds for a container to be removed


class ContainerFailed(Exception):
    """Docker gave no server in the time allowed."""


class Container:
    """A server in Docker. Begins to start at once; `wait` for its url, and `stop` it in the end."""

    def __init__(self, kind: str, engine: str) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # closed by stop()
        tests = str(Path(__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "harness.containers", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={**os.environ, "PYTHONPATH": tests, "DOCKER_HOST": engine},
            start_new_session=True,  # Ctrl-C is for the tests; this one ends after them
        )

    def wait(self, limit: float) -> str:
        """The url. ContainerFailed, with what is known of the reason, after `limit` seconds or before."""
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        url = self._process.stdout.readline().decode().strip() if ready else ""
        if url:
            return url
        self._process.terminate()
        self.stop(keep_complaints=True)
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        self._complaints.close()
        raise ContainerFailed(lines[-1][:200] if ready and lines else "no container in time")

    def stop(self, *, keep_complaints: bool = False) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if not keep_complaints:
            self._complaints.close()


def main(kind: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("was told to end"))
    from testcontainers.core.config import testcontainers_config

    testcontainers_config.ryuk_disabled = True  # this process itself removes the container
    with _container(kind) as container:
        host = container.get_container_host_ip()
        if kind == "redis":
            print(f"redis://{host}:{container.get_exposed_port(6379)}/0", flush=True)
        else:
            print(container.get_connection_url(), flush=True)
        sys.stdin.read()


def _container(kind: str) -> DockerContainer:
    if kind == "redis":
        from testcontainers.community.redis import RedisContainer

        return RedisContainer(IMAGES[kind])
    from testcontainers.community.postgres import PostgresContainer

    return PostgresContainer(
        IMAGES[kind], username="postgres", password="postgres", dbname="postgres", driver="psycopg"
    )


if __name__ == "__main__":
    main(sys.argv[1])
