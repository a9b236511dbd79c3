"""The base models that adapters belong to. This server serves one of them."""

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from manylora.platform.db import insert_if_new
from manylora.platform.errors import ConflictError
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import Adapter, BaseModel


def register_base_model(session: Session, *, name: str, digest: str) -> BaseModel:
    """The row of the base model that is about to be served, made if it is new.

    Raises:
        ConflictError: adapters were checked against other weights under this name, or a tenant's
            adapter is called so, whose requests the base model would answer.
    """
    if session.scalar(select(exists().where(Adapter.name == name, Adapter.deleted_at.is_(None)))):
        raise ConflictError(
            f"a tenant has an adapter called {name!r}; serve the base model under another "
            "--served-model-name"
        )
    insert_if_new(
        session, BaseModel, id=new_id("bas"), name=name, digest=digest, created_at=now_us()
    )
    found = session.scalars(select(BaseModel).where(BaseModel.name == name)).one()
    if found.digest != digest:
        owns = exists().where(Adapter.base_model_id == found.id, Adapter.deleted_at.is_(None))
        if session.scalar(select(owns)):
            raise ConflictError(
                f"the adapters of base model {name!r} were checked against other weights; "
                "serve these under another --served-model-name"
            )
        found.digest = digest
    return found
