from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.sides import SIDES, Side

MakeSide = Callable[..., Side]


@pytest.fixture(params=SIDES, ids=lambda kind: kind.name)
def make_side(request: pytest.FixtureRequest, namespace: str) -> Iterator[MakeSide]:
    """Makes `Leases` or `AsyncLeases`, whichever the test is run for, behind one face."""
    made: list[Side] = []

    def make(url: str, **options: Any) -> Side:
        side = request.param(url, options.pop("namespace", namespace), **options)
        made.append(side)
        return side

    yield make
    for side in made:
        side.close()


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program of its own that talks over its pipes; ends it in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", "-c", source, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(happened: Callable[[], object], limit: float = 10.0) -> None:
    """Wait for something that announces itself only to those who look."""
    end = time.monotonic() + limit
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{happened} did not happen within {limit} s")
        time.sleep(0.002)
