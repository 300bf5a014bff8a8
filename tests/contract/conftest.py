"""The contract is asked of every backend in `SUBJECTS`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.subjects import SUBJECTS, BackgroundLoop, Make, Subject


@pytest.fixture(scope="session")
def background_loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


@pytest.fixture(params=SUBJECTS.values(), ids=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A backend with a namespace of its own."""
    make: Make = request.param
    with make(request) as subject:
        yield subject
