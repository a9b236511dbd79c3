"""Tenants, keys, adapters, usage, operators."""

import sqlalchemy as sa
from alembic import op

revision = "0001_foundation"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base_models")),
        sa.UniqueConstraint("name", name=op.f("uq_base_models_name")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("slug", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("slug", name=op.f("uq_tenants_slug")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("email", sa.String(length=254), nullable=False),
        sa.Column("password_hash", sa.String(), nullable=False),
        sa.Column("is_operator", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_login_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("status IN ('active', 'disabled')", name=op.f("ck_users_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("base_model_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["base_model_id"],
            ["base_models.id"],
            name=op.f("fk_adapters_base_model_id_base_models"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_adapters_tenant_id_id")),
    )
    op.create_index(
        "uq_adapters_tenant_id_name_live",
        "adapters",
        ["tenant_id", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )

    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("prefix", sa.String(length=32), nullable=False),
        sa.Column("last4", sa.String(length=4), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_api_keys_tenant_id_id")),
    )
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("user_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("idle_expires_at", sa.BigInteger(), nullable=False),
        sa.Column("absolute_expires_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_sessions_user_id_users")),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_user_id"), "sessions", ["user_id"])

    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('ready', 'failed')", name=op.f("ck_adapter_versions_state")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name=op.f("fk_adapter_versions_tenant_id_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint(
            "adapter_id", "digest", name=op.f("uq_adapter_versions_adapter_id_digest")
        ),
        sa.UniqueConstraint("adapter_id", "id", name=op.f("uq_adapter_versions_adapter_id_id")),
        sa.UniqueConstraint(
            "adapter_id", "number", name=op.f("uq_adapter_versions_adapter_id_number")
        ),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_adapter_versions_tenant_id_id")),
    )
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("version_id", sa.String(length=40), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version_id"],
            ["adapter_versions.adapter_id", "adapter_versions.id"],
            name=op.f("fk_adapter_aliases_adapter_id_version_id_adapter_versions"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name=op.f("fk_adapter_aliases_tenant_id_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name=op.f("pk_adapter_aliases")),
    )
    op.create_table(
        "usage_records",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("base_model", sa.String(length=200), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=True),
        sa.Column("adapter_version_id", sa.String(length=40), nullable=True),
        sa.Column("adapter_version", sa.BigInteger(), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=True),
        sa.Column("route", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queued_us", sa.BigInteger(), nullable=False),
        sa.Column("ttft_us", sa.BigInteger(), nullable=False),
        sa.Column("total_us", sa.BigInteger(), nullable=False),
        sa.Column("occurred_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("cached_tokens <= prompt_tokens", name=op.f("ck_usage_records_cached")),
        sa.CheckConstraint(
            "delivered_tokens <= completion_tokens", name=op.f("ck_usage_records_delivered")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
            name=op.f("fk_usage_records_tenant_id_adapter_version_id_adapter_versions"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_usage_records_tenant_id_key_id_api_keys"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_usage_records_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_records")),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_records_request_id")),
    )
    op.create_index(op.f("ix_usage_records_occurred_at_id"), "usage_records", ["occurred_at", "id"])
    op.create_index(
        op.f("ix_usage_records_tenant_id_occurred_at_id"),
        "usage_records",
        ["tenant_id", "occurred_at", "id"],
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_usage_records_tenant_id_occurred_at_id"), table_name="usage_records")

    op.drop_index(op.f("ix_usage_records_occurred_at_id"), table_name="usage_records")
    op.drop_table("usage_records")
    op.drop_table("adapter_aliases")
    op.drop_table("adapter_versions")
    op.drop_index(op.f("ix_sessions_user_id"), table_name="sessions")

    op.drop_table("sessions")
    op.drop_table("api_keys")
    op.drop_index(
        "uq_adapters_tenant_id_name_live",
        table_name="adapters",
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )

    op.drop_table("adapters")
    op.drop_table("users")
    op.drop_table("tenants")
    op.drop_table("base_models")
