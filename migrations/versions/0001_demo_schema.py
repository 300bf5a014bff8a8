"""The demo application's table: an invoice that workers settle.

Revision: 0001
Follows: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "invoice",
        # SQLite numbers rows by itself only when the key's type is spelled INTEGER.
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("paid_by", sa.String(255), nullable=True),
    )


def downgrade() -> None:
    op.drop_table("invoice")
