"""The databases that the guard is tried on, one for each driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guard_kit.databases import DRIVERS, Database, Databases


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    with Databases(tmp_path_factory.mktemp("sqlite")) as databases:
        yield databases


@pytest.fixture(params=DRIVERS)
def database(request: pytest.FixtureRequest, databases: Databases) -> Database:
    """A database of this worker behind one driver. Its tables are there; its rows are whatever you `seed`."""
    return databases.get(request.param, request)
