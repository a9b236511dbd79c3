"""The name of the base model is never an adapter's: a request names one of the two."""

import pytest

from manylora.platform.base_models import register_base_model
from manylora.platform.errors import ConflictError
from manylora.platform.models import Adapter
from support.app import TestBed


def test_a_tenants_adapter_is_not_shadowed_by_the_base(bed: TestBed) -> None:
    with (
        bed.services.db.write() as session,
        pytest.raises(ConflictError, match=r"'pirate'.*--served-model-name"),
    ):
        register_base_model(session, name="pirate", digest="1" * 64)


def test_a_deleted_adapter_gives_its_name_back(bed: TestBed) -> None:
    with bed.services.db.write() as session:
        session.query(Adapter).update({"deleted_at": 1})
        made = register_base_model(session, name="pirate", digest="1" * 64)

    assert made.name == "pirate"
