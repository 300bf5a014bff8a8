"""The asyncio twin of the guarded repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from fencing.sql.binding import Holding
from fencing.sql.repository import GuardedRepository, Written
from fencing.sql.session import Guarded, guarded
from fencing.token import Grant

M = TypeVar("M")


class AsyncGuardedRepository(Generic[M]):
    """Reads and writes of one model under a lease. Subclass it and add your own methods.

    The asyncio twin of `GuardedRepository`, on an `AsyncSession`: the same methods, awaited.

    Example::

        invoices = AsyncGuardedRepository(Invoice, session, lease)
        await invoices.update(42, state="paid")
        await session.commit()
    """

    def __init__(self, model: type[M], session: AsyncSession, lease: Holding | Grant | None = None) -> None:
        self.model = model
        self.session = session
        self.lease = lease
        self._sync = GuardedRepository(model, session.sync_session, lease)

    def guarding(self) -> Guarded[AsyncSession] | nullcontext[AsyncSession]:
        """The session, guarded: for methods of your own.

        Enter it by `with` or `async with`.
        """
        return nullcontext(self.session) if self.lease is None else guarded(self.session, self.lease)

    async def get(self, identity: object) -> M | None:
        """The row, read while the lease is held, or None."""
        return await self.session.run_sync(lambda _: self._sync.get(identity))

    async def add(self, entity: M) -> M:
        """Insert a new row; the same object, with what the database filled in."""
        return await self.session.run_sync(lambda _: self._sync.add(entity))

    async def add_many(self, entities: Iterable[M]) -> list[M]:
        """Insert new rows, in one batch where the database can."""
        return await self.session.run_sync(lambda _: self._sync.add_many(entities))

    async def save(self, entity: M) -> M:
        """Write the present state of an object, whether it is new, loaded or detached."""
        return await self.session.run_sync(lambda _: self._sync.save(entity))

    async def save_many(self, entities: Iterable[M]) -> list[M]:
        """Write the present state of objects, in one flush."""
        return await self.session.run_sync(lambda _: self._sync.save_many(entities))

    async def claim(self, identity: object) -> Written:
        """Raise the row's fence to this lease, and nothing else: from here on older holders are refused."""
        return await self.session.run_sync(lambda _: self._sync.claim(identity))

    async def claim_many(self, identities: Iterable[object]) -> list[Written]:
        """Raise the fence of several rows."""
        return await self.session.run_sync(lambda _: self._sync.claim_many(identities))

    async def update(self, identity: object, **values: Any) -> Written:
        """Set attributes of one row, without reading it first. Values may be SQL expressions."""
        return await self.session.run_sync(lambda _: self._sync.update(identity, **values))

    async def update_many(self, rows: Iterable[Mapping[str, Any]]) -> list[Written]:
        """Set attributes of several rows; each mapping names its primary key too. Values are plain."""
        return await self.session.run_sync(lambda _: self._sync.update_many(rows))

    async def upsert(self, values: Mapping[str, Any], *, key: Sequence[str] | None = None) -> Written:
        """Insert a row, or update the one that has the same key (the primary key, when none is named)."""
        return await self.session.run_sync(lambda _: self._sync.upsert(values, key=key))

    async def upsert_many(
        self, rows: Iterable[Mapping[str, Any]], *, key: Sequence[str] | None = None
    ) -> list[Written]:
        """Insert rows, or update those that are there, in one statement."""
        return await self.session.run_sync(lambda _: self._sync.upsert_many(rows, key=key))

    async def delete(self, identity: object) -> Written:
        """Delete one row: by one statement, or through the session when the ORM has more to do for it."""
        return await self.session.run_sync(lambda _: self._sync.delete(identity))

    async def delete_many(self, identities: Iterable[object]) -> list[Written]:
        """Delete several rows."""
        return await self.session.run_sync(lambda _: self._sync.delete_many(identities))
