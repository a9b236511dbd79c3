"""From the `model` string of a request to a base model or one version of an adapter."""

import re
from dataclasses import dataclass

from sqlalchemy.orm import Session

from manylora.platform.adapters import LIVE, AdapterView, find_adapter_named, list_adapters
from manylora.platform.errors import InvalidInputError, ModelNotFoundError
from manylora.platform.models import AdapterVersion, BaseModel

_MAX_MODEL_LENGTH = 256
_VERSION = re.compile(r"v([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes. Without an adapter it goes to the base model, by name."""

    base_model: str
    adapter: str | None = None  # its name
    adapter_id: str | None = None
    version_id: str | None = None
    version: int | None = None
    digest: str | None = None
    created_us: int = 0

    @property
    def headers(self) -> dict[str, str]:
        """Which adapter version answers, for the client to see."""
        if self.digest is None:
            return {}
        return {"x-adapter-version": f"v{self.version}", "x-adapter-digest": self.digest}


@dataclass(frozen=True, slots=True)
class CallableModel:
    """One entry of `/v1/models`."""

    id: str
    created_us: int
    parent: str | None  # the base model, for an adapter


def resolve(session: Session, tenant_id: str, base: BaseModel, model: str) -> Route:
    """What `model` names for this tenant: `name`, `name@alias`, `name@v3` or the base model.

    Raises:
        ModelNotFoundError: nothing, or another tenant's: never told apart.
    """
    if model == base.name:
        return Route(base_model=base.name, created_us=base.created_at)
    return resolve_adapter(session, tenant_id, base, model)


def resolve_adapter(session: Session, tenant_id: str, base: BaseModel, model: str) -> Route:
    """The same for what must be an adapter.

    Raises:
        ModelNotFoundError
    """
    name, at, label = model.partition("@")
    if len(model) > _MAX_MODEL_LENGTH or (at and not label):
        raise ModelNotFoundError(model)
    view = find_adapter_named(session, tenant_id, name)
    version = _version(view, label or LIVE) if view else None
    if view is None or version is None or view.adapter.base_model_id != base.id:
        raise ModelNotFoundError(model)
    return Route(
        base_model=base.name,
        adapter=view.adapter.name,
        adapter_id=view.adapter.id,
        version_id=version.id,
        version=version.number,
        digest=version.digest,
        created_us=version.created_at,
    )


def within_adapter(name: str, model: str | None) -> str:
    """The model meant on the adapter's own base URL, where it may be absent.

    Raises:
        InvalidInputError: it is neither the adapter nor one of its aliases or versions.
    """
    if model is None:
        return name
    if model.partition("@")[0] != name:
        raise InvalidInputError(
            "on this URL model must be the adapter's own name, alias or version", param="model"
        )
    return model


def callable_models(session: Session, tenant_id: str, base: BaseModel) -> list[CallableModel]:
    """Exactly what this tenant may call: the base, each adapter name and each alias."""
    models = [CallableModel(base.name, base.created_at, None)]
    for view in list_adapters(session, tenant_id):
        if view.adapter.base_model_id == base.id and view.live is not None:
            models.append(CallableModel(view.adapter.name, view.adapter.created_at, base.name))
            models += [
                CallableModel(f"{view.adapter.name}@{a.alias}", view.adapter.created_at, base.name)
                for a in view.aliases
            ]
    return models


def _version(view: AdapterView, label: str) -> AdapterVersion | None:
    number = _VERSION.fullmatch(label)
    if number is None:
        return view.at(label)
    return next((v for v in view.versions if v.number == int(number[1])), None)
