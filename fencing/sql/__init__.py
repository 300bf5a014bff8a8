"""The SQL half: SQLAlchemy writes that a stale holder cannot make."""

from fencing.sql.binding import Holding
from fencing.sql.engine import install
from fencing.sql.fence import Fenced, fence, fence_columns
from fencing.sql.repository import GuardedRepository, Written
from fencing.sql.repository_async import AsyncGuardedRepository
from fencing.sql.session import FencedSession, guarded, unguarded, using

__all__ = [
    "AsyncGuardedRepository",
    "Fenced",
    "FencedSession",
    "GuardedRepository",
    "Holding",
    "Written",
    "fence",
    "fence_columns",
    "guarded",
    "install",
    "unguarded",
    "using",
]
