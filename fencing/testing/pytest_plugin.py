"""Fixtures for your tests, there as soon as the package is installed."""

from __future__ import annotations

import pytest

from fencing.lease import Leases
from fencing.lease_async import AsyncLeases
from fencing.testing import AsyncMemoryBackend, AsyncMemoryLedger, FakeClock, MemoryBackend, MemoryLedger


@pytest.fixture
def fencing_clock() -> FakeClock:
    """A clock that stands still until you move it."""
    return FakeClock()


@pytest.fixture
def fencing_backend(fencing_clock: FakeClock) -> MemoryBackend:
    """Leases in memory, on the fake clock; it can be told to fail."""
    return MemoryBackend(fencing_clock)


@pytest.fixture
def fencing_ledger() -> MemoryLedger:
    """A ledger in memory."""
    return MemoryLedger()


@pytest.fixture
def fencing_leases(fencing_backend: MemoryBackend, fencing_ledger: MemoryLedger) -> Leases:
    """`Leases` with a ledger, all in memory, on the fake clock."""
    return Leases(fencing_backend, namespace="test", ledger=fencing_ledger)


@pytest.fixture
def async_fencing_leases(fencing_backend: MemoryBackend, fencing_ledger: MemoryLedger) -> AsyncLeases:
    """`AsyncLeases` on the same memory as `fencing_leases`."""
    return AsyncLeases(
        AsyncMemoryBackend(sync=fencing_backend), namespace="test", ledger=AsyncMemoryLedger(fencing_ledger)
    )
