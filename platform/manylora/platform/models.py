"""The tables. Times are UTC microseconds; ids are prefixed UUIDv7 text.

Children of a tenant carry `tenant_id` in a composite foreign key, so that a link from one
tenant's row to another's cannot be stored.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012 -- SQLAlchemy reads it as a class attribute
        int: BigInteger,
        dict[str, Any]: JSON,
        list[str]: JSON,
        bytes: LargeBinary,
    }


class Tenant(Base):
    """A customer. Everything it owns carries its id."""

    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("status IN ('active', 'suspended')", name="status"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    slug: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(String(16), default="active")
    created_at: Mapped[int]


class User(Base):
    """A person who signs in to `/admin`."""

    __tablename__ = "users"
    __table_args__ = (CheckConstraint("status IN ('active', 'disabled')", name="status"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    email: Mapped[str] = mapped_column(String(254), unique=True)  # lower case
    password_hash: Mapped[str]  # argon2id
    is_operator: Mapped[bool] = mapped_column(default=False)
    status: Mapped[str] = mapped_column(String(16), default="active")
    created_at: Mapped[int]
    last_login_at: Mapped[int | None]


class Session(Base):
    """A signed-in browser. Only the SHA-256 of its cookie is kept."""

    __tablename__ = "sessions"
    __table_args__ = (Index(None, "user_id"),)

    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[int]
    idle_expires_at: Mapped[int]
    absolute_expires_at: Mapped[int]
    revoked_at: Mapped[int | None]


class ApiKey(Base):
    """A tenant's key. Only the SHA-256 of its secret is kept."""

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(200))
    prefix: Mapped[str] = mapped_column(String(32))  # what people recognise it by
    last4: Mapped[str] = mapped_column(String(4))
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    scopes: Mapped[list[str]]
    expires_at: Mapped[int | None]
    revoked_at: Mapped[int | None]
    last_used_at: Mapped[int | None]  # coarse: written at most once a minute
    created_at: Mapped[int]


class BaseModel(Base):
    """A base model that adapters belong to. A deployment may have several."""

    __tablename__ = "base_models"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)  # as `model` in requests
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int]


class Adapter(Base):
    """A tenant's adapter: a name over a series of immutable versions."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        Index(
            "uq_adapters_tenant_id_name_live",
            "tenant_id",
            "name",
            unique=True,
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))  # lower case
    base_model_id: Mapped[str] = mapped_column(ForeignKey("base_models.id"))
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class AdapterVersion(Base):
    """Immutable weights, known by the SHA-256 of their canonical form."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        UniqueConstraint("adapter_id", "id"),
        UniqueConstraint("adapter_id", "number"),
        UniqueConstraint("adapter_id", "digest"),
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        CheckConstraint("state IN ('ready', 'failed')", name="state"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    adapter_id: Mapped[str] = mapped_column(String(40))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int]
    report: Mapped[dict[str, Any]]  # the coverage report of the check
    created_at: Mapped[int]


class AdapterAlias(Base):
    """A movable name for one version of one adapter. `live` is what the bare name means."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        ForeignKeyConstraint(
            ["adapter_id", "version_id"], ["adapter_versions.adapter_id", "adapter_versions.id"]
        ),
    )

    adapter_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    alias: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    version_id: Mapped[str] = mapped_column(String(40))
    generation: Mapped[int]  # moves by compare-and-set


class UsageRecord(Base):
    """One row for each answered request. Rows are only ever added."""

    __tablename__ = "usage_records"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
        ),
        CheckConstraint("cached_tokens <= prompt_tokens", name="cached"),
        CheckConstraint("delivered_tokens <= completion_tokens", name="delivered"),
        Index(None, "tenant_id", "occurred_at", "id"),
        Index(None, "occurred_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    request_id: Mapped[str] = mapped_column(String(64), unique=True)
    key_id: Mapped[str] = mapped_column(String(40))
    base_model: Mapped[str] = mapped_column(String(200))
    adapter: Mapped[str | None] = mapped_column(String(64))
    adapter_version_id: Mapped[str | None] = mapped_column(String(40))
    adapter_version: Mapped[int | None]
    adapter_digest: Mapped[str | None] = mapped_column(String(64))
    route: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))  # generation.Status
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]  # computed by the engine
    delivered_tokens: Mapped[int]  # handed to the client's socket
    queued_us: Mapped[int]
    ttft_us: Mapped[int]
    total_us: Mapped[int]
    occurred_at: Mapped[int]


class RequestLife(Base):
    """How one request went, stage by stage. The oldest rows are deleted."""

    __tablename__ = "request_lives"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        Index(None, "tenant_id", "request_id"),
    )

    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # sorts by time
    tenant_id: Mapped[str] = mapped_column(String(40))
    key_id: Mapped[str] = mapped_column(String(40))
    adapter: Mapped[str | None] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))  # one of life.STATUSES
    received_at: Mapped[int]
    body: Mapped[dict[str, Any]]  # Life.as_json
