"""A fence on invoice: the highest token admitted, and the holder it was admitted for.

Revision: 0002
Follows: 0001

Rows that are already there start at token 0 and the zero holder, below every token that is ever issued, so
the first guarded write of any holder is admitted. Code that knows nothing of the fence keeps inserting: the
defaults live in the database. The columns are never indexed: an index on a column that changes with every
write would cost PostgreSQL its HOT updates.

The downgrade forgets the tokens. Stop guarded writers first: after the next upgrade a holder that was stale
before it would be admitted again.
"""

from uuid import UUID

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NO_HOLDER = UUID(int=0)


def upgrade() -> None:
    _give_up_when_the_table_is_busy()
    # Constant defaults: PostgreSQL 11+ and SQLite note them in the catalogue and do not touch the rows.
    op.add_column(
        "invoice",
        sa.Column("fence_token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )
    # The default is a typed literal, not a string, so that each dialect spells it as it stores holders: with
    # dashes in a native UUID, as 32 digits in a CHAR(32). Spelled the other way it would equal no holder.
    op.add_column(
        "invoice",
        sa.Column("fence_holder", sa.Uuid(), nullable=False, server_default=sa.literal(NO_HOLDER, sa.Uuid())),
    )


def downgrade() -> None:
    _give_up_when_the_table_is_busy()
    op.drop_column("invoice", "fence_holder")
    op.drop_column("invoice", "fence_token")


def _give_up_when_the_table_is_busy() -> None:
    """Bound the wait for the table's lock, so that a long reader costs a retry and not an outage.

    ALTER TABLE waits for every transaction that has read the table, and everything that comes after queues
    behind the waiting ALTER. After one second it fails (55P03) with nothing changed: run it again.
    """
    if op.get_context().dialect.name == "postgresql":
        op.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
