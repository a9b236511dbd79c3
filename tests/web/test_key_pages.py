"""Keys are made, shown once, revoked."""

import re
import time

import pytest
from sqlalchemy import func, select

from manylora.platform.keys import list_keys
from manylora.platform.models import ApiKey
from support.site import words_of


def test_a_key_that_is_made_works_until_it_is_revoked(signed_in):
    signed_in.add_tenant()

    made = signed_in.post("/admin/keys", tenant="acme", name="laptop")

    secret = re.search(r'id="new-key">(ml_\w+)<', made.text)[1]
    models = signed_in.get("/v1/models", authorization=f"Bearer {secret}")
    assert models.status_code == 200
    with signed_in.db.read() as session:
        [key] = list_keys(session)
    assert (key.name, key.scopes, key.expires_at) == ("laptop", ["infer"], None)

    signed_in.post(f"/admin/keys/{key.id}/revoke")
    assert signed_in.get("/v1/models", authorization=f"Bearer {secret}").status_code == 401
    assert "revoked" in words_of(signed_in.get("/admin/keys").text)


def test_scopes_and_lifetime_are_those_that_were_chosen(signed_in):
    signed_in.add_tenant()

    signed_in.post(
        "/admin/keys", tenant="acme", name="ci", scopes=["infer", "manage"], expires="30"
    )

    with signed_in.db.read() as session:
        [key] = list_keys(session)
    assert key.scopes == ["infer", "manage"]
    days = (key.expires_at - time.time_ns() // 1000) / 86_400e6
    assert days == pytest.approx(30, abs=0.01)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tenant": "", "name": "x"}, "tenant"),
        ({"tenant": "nobody", "name": "x"}, "tenant"),
        ({"tenant": "acme\0", "name": "x"}, "tenant"),
        ({"tenant": "acme", "name": ""}, "name"),
        ({"tenant": "acme", "name": "a\nb"}, "name"),
        ({"tenant": "acme", "name": "x", "scopes": "root"}, "scopes"),
        ({"tenant": "acme", "name": "x", "expires": "-1"}, "expires"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(signed_in, values, field):
    signed_in.add_tenant()

    answer = signed_in.post("/admin/keys", **values)

    assert answer.status_code == 422
    assert f'id="{field}-notes"><p class="error">' in re.sub(r">\s+<", "><", answer.text)
    with signed_in.db.read() as session:
        assert session.scalar(select(func.count()).select_from(ApiKey)) == 0


def test_revoking_asks_first(signed_in):
    key, secret = signed_in.add_key(signed_in.add_tenant())
    [path] = re.findall(r'href="(/admin/keys/[^"]+/revoke)"', signed_in.get("/admin/keys").text)

    asked = signed_in.get(path)

    assert f'<form class="actions" method="post" action="{path}">' in asked.text
    assert f"{key.prefix}…{key.last4}" in asked.text
    assert "Revoke the key app of acme?" in words_of(asked.text)
    assert signed_in.get("/v1/models", authorization=f"Bearer {secret}").status_code == 200
    assert "/revoke" not in "".join(re.findall("<form[^>]*>", signed_in.get("/admin/keys").text))


@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_call_beside_a_new_key_is_of_the_tenants_adapter_if_it_has_one(signed_in, has_adapter):
    tenant = signed_in.add_tenant()
    signed_in.add_adapter(signed_in.add_tenant("globex"), "other")
    if has_adapter:
        signed_in.add_adapter(tenant, "pirate")

    made = signed_in.post("/admin/keys", tenant="acme", name="laptop")

    base = signed_in.services.base_model.name
    assert f'"model": "{"pirate" if has_adapter else base}"' in made.text


def test_an_unknown_key_cannot_be_revoked(signed_in):
    assert signed_in.get("/admin/keys/key_0/revoke").status_code == 404
    assert signed_in.post("/admin/keys/key_0/revoke").status_code == 404
    assert signed_in.post("/admin/keys/%00/revoke").status_code == 404
