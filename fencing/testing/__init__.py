"""What you import in your own tests: a clock you move, leases without Redis, a ledger without a database.

Example::

    def test_worker_stops_when_superseded(fencing_leases):
        lease = fencing_leases.acquire("invoice:42")
        with supersede(lease):
            with pytest.raises(LeaseNotHeld):
                lease.renew()
"""

from __future__ import annotations

import threading

from fencing.backends.base import CALL_TIMEOUT, Behind, Release
from fencing.backends.memory import AsyncMemoryBackend, MemoryBackend
from fencing.errors import ClaimLost, StaleToken
from fencing.lease import Lease, Leases
from fencing.lease_async import AsyncLease, AsyncLeases
from fencing.testing.clock import FakeClock
from fencing.token import Grant, admits

__all__ = [
    "AsyncMemoryBackend",
    "AsyncMemoryLedger",
    "FakeClock",
    "MemoryBackend",
    "MemoryLedger",
    "supersede",
    "supersede_async",
]


class MemoryLedger:
    """A ledger in a dict: claims and assertions by the same rules as in a database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows: dict[tuple[str, str], tuple[int, str]] = {}

    def claim(self, grant: Grant) -> Behind | None:
        """Advance to the grant for all its resources or none; `Behind` when it is not admitted."""
        with self._lock:
            keys = [(grant.namespace, resource) for resource in grant.resources]
            ahead = [
                row
                for key in keys
                if (row := self.rows.get(key)) is not None and not admits(grant.token, grant.holder, *row)
            ]
            if ahead:
                return Behind(*max(ahead))
            self.rows.update(dict.fromkeys(keys, (grant.token, grant.holder)))
            return None

    def assert_current(self, grant: Grant) -> None:
        """Raise `StaleToken` or `ClaimLost` unless the ledger holds exactly this token and holder."""
        for resource in grant.resources:
            with self._lock:
                stored = self.rows.get((grant.namespace, resource))
            if stored == (grant.token, grant.holder):
                continue
            if stored is None or stored[0] < grant.token:
                raise ClaimLost(
                    f"the ledger does not know the claim of token {grant.token} on {resource!r}",
                    resource=resource,
                    token=grant.token,
                    holder=grant.holder,
                )
            raise StaleToken(
                f"token {grant.token} on {resource!r} is stale: the ledger is at {stored[0]}",
                resource=resource,
                token=grant.token,
                holder=grant.holder,
                stored_token=stored[0],
                stored_holder=stored[1],
            )


class AsyncMemoryLedger:
    """The asyncio twin: the same dict behind coroutines. `sync` is the `MemoryLedger` underneath."""

    def __init__(self, sync: MemoryLedger | None = None) -> None:
        self.sync = sync or MemoryLedger()

    async def claim(self, grant: Grant) -> Behind | None:
        """Advance to the grant for all its resources or none; `Behind` when it is not admitted."""
        return self.sync.claim(grant)

    async def assert_current(self, grant: Grant) -> None:
        """Raise `StaleToken` or `ClaimLost` unless the ledger holds exactly this token and holder."""
        self.sync.assert_current(grant)


def supersede(lease: Lease) -> Lease:
    """Let another holder take the resource over, as if this one had slept past its TTL; the new lease.

    `lease` does not know of it yet. Works on any backend; with a ledger the new holder has claimed.
    """
    mine = lease._leases
    mine.backend.ask(Release(lease._command.target, lease.holder), CALL_TIMEOUT)
    other = Leases(
        mine.backend, namespace=mine.namespace, ledger=mine.ledger, label="superseder", clock=mine.clock
    )
    return other.acquire_all(lease.resources, ttl=lease.ttl)


async def supersede_async(lease: AsyncLease) -> AsyncLease:
    """Let another holder take the resource over, as if this one had slept past its TTL; the new lease.

    `lease` does not know of it yet. Works on any backend; with a ledger the new holder has claimed.
    """
    mine = lease._leases
    await mine.backend.ask(Release(lease._command.target, lease.holder), CALL_TIMEOUT)
    other = AsyncLeases(
        mine.backend, namespace=mine.namespace, ledger=mine.ledger, label="superseder", clock=mine.clock
    )
    return await other.acquire_all(lease.resources, ttl=lease.ttl)
