"""The seam between deciding and doing: commands, replies, and who answers them.

A command says everything the backend needs, so it can be sent again when an answer was lost. Commands and
replies are named tuples because they are made on every acquire and those are built in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fencing.errors import FencingError
from fencing.token import Grant, HeldBy

CALL_TIMEOUT = 2.0
"""Seconds that one request may take, unless a policy says less."""

NOTE_KEEP_MS = 3_600_000
"""How long the note of a holder outlives its lease, so that a takeover can tell an orphan."""


new = tuple.__new__
"""Makes a named tuple of ours without its Python-level `__new__`: these are made several times a cycle."""


class Target(NamedTuple):
    """The resources of one lease, with what the backend packed for them once."""

    namespace: str
    resources: tuple[str, ...]
    packed: bytes = b""

    @property
    def name(self) -> str:
        return ", ".join(self.resources)


class Acquire(NamedTuple):
    """Take every resource of the target and mint a token above `floor`, or take none.

    Sent again with the same holder it returns the same token and counts the TTL anew. `note`: leave a
    note of this holder, so that its expiry is seen as an orphan.
    """

    target: Target
    holder: str
    label: str
    ttl_ms: int
    floor: int = 0
    note: bool = True


class Remint(NamedTuple):
    """Mint above `floor` if the holder still holds all of the target; the TTL runs on."""

    target: Target
    holder: str
    floor: int


class Renew(NamedTuple):
    """Count the TTL anew if the holder still holds all of the target; never to less than is left."""

    target: Target
    holder: str
    ttl_ms: int
    note: bool = True


class Release(NamedTuple):
    """Free what the holder still holds of the target."""

    target: Target
    holder: str


class Peek(NamedTuple):
    """Say who holds the (first) resource of the target."""

    target: Target


Command = Acquire | Remint | Renew | Release | Peek


class Orphan(NamedTuple):
    """The lease before this one ended by expiry. `unowned`: for how many seconds nobody held the resource."""

    previous: HeldBy
    unowned: float


class Granted(NamedTuple):
    token: int
    orphans: tuple[Orphan, ...] = ()


class Busy(NamedTuple):
    held_by: HeldBy


class Done(NamedTuple):
    """Renewed or released, as asked."""


class NotHeld(NamedTuple):
    """Not renewed, or not all released: `resource` is free or `held_by` somebody else."""

    resource: str
    held_by: HeldBy | None


class Poisoned(NamedTuple):
    """A token so far above the clock was asked for that minting it would poison the fence."""

    floor: int


class Seen(NamedTuple):
    held_by: HeldBy | None


Reply = Granted | Busy | Done | NotHeld | Poisoned | Seen


class Backend(Protocol):
    """Answers commands. Raises `BackendUnavailable` when it cannot, `ConfigurationError` when it never will.

    Must be safe to call from several threads.
    """

    def target(self, namespace: str, resources: tuple[str, ...]) -> Target: ...

    def ask(self, command: Command, timeout: float) -> Reply: ...

    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        """An answer for each, in order, in one batch; what failed is returned, not raised."""

    def rest(self, unused_for: float = 0.0) -> None:
        """Give back what is kept only for speed, if it was not used for so many seconds."""

    def close(self) -> None: ...

    def after_fork(self) -> None:
        """In a forked child: forget connections without a word to the server."""


class AsyncBackend(Protocol):
    """The asyncio twin of `Backend`."""

    def target(self, namespace: str, resources: tuple[str, ...]) -> Target: ...

    async def ask(self, command: Command, timeout: float) -> Reply: ...

    async def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        """An answer for each, in order, in one batch; what failed is returned, not raised."""

    async def rest(self, unused_for: float = 0.0) -> None:
        """Give back what is kept only for speed, if it was not used for so many seconds."""

    async def close(self) -> None: ...

    def after_fork(self) -> None:
        """In a forked child: forget connections without a word to the server."""


class Behind(NamedTuple):
    """A claim was refused: the ledger is at `token` of `holder` already."""

    token: int
    holder: str


class LedgerProtocol(Protocol):
    """All that the lease half knows of a ledger."""

    def claim(self, grant: Grant) -> Behind | None:
        """Advance the ledger to the grant, durably, for all its resources or none; None when admitted."""

    def assert_current(self, grant: Grant) -> None:
        """Raise `StaleToken` or `ClaimLost` unless the ledger holds exactly this token and holder."""


class AsyncLedgerProtocol(Protocol):
    """The asyncio twin of `LedgerProtocol`."""

    async def claim(self, grant: Grant) -> Behind | None:
        """Advance the ledger to the grant, durably, for all its resources or none; None when admitted."""

    async def assert_current(self, grant: Grant) -> None:
        """Raise `StaleToken` or `ClaimLost` unless the ledger holds exactly this token and holder."""
