"""End-to-end tests start real processes; those with PostgreSQL take it from `support.postgres`."""

from support.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]
