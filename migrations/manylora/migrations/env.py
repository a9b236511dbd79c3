"""Runs revisions on the connection that `manylora.platform.migrate` hands over."""

from alembic import context
from sqlalchemy import MetaData

config = context.config
# Set only by those who compare or write revisions; running them needs no models.
target_metadata: MetaData | None = config.attributes.get("target_metadata")

context.configure(
    connection=config.attributes["connection"],
    target_metadata=target_metadata,
    render_as_batch=True,  # SQLite changes a table by making it anew
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
