"""Requests' lives."""

import sqlalchemy as sa
from alembic import op

revision = "0002_request_lives"
down_revision = "0001_foundation"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "request_lives",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_request_lives_tenant_id_key_id_api_keys"),
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_request_lives")),
    )
    op.create_index(
        op.f("ix_request_lives_tenant_id_request_id"), "request_lives", ["tenant_id", "request_id"]
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_request_lives_tenant_id_request_id"), table_name="request_lives")
    op.drop_table("request_lives")
