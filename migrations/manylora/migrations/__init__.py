"""The database's history as Alembic revisions. Data, not code: it never imports the models."""
