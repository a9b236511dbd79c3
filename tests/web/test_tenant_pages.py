"""Tenants are made, shown, suspended."""

import re

import pytest
from sqlalchemy import func, select

from manylora.platform.keys import authenticate
from manylora.platform.models import Tenant
from manylora.platform.tenants import find_tenant
from support.site import SAME_ORIGIN, words_of


def test_a_tenant_is_made_and_listed_under_its_slug(signed_in):
    answer = signed_in.post("/admin/tenants", slug="acme", name="Acme Corporation")

    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/admin/tenants/acme")
    assert "Acme Corporation" in signed_in.get("/admin/tenants").text
    assert "The tenant was created" in signed_in.get(answer.headers["location"]).text


def test_without_a_name_the_slug_is_the_name(signed_in):
    signed_in.post("/admin/tenants", slug="acme", name="")

    with signed_in.db.read() as session:
        assert find_tenant(session, "acme").name == "acme"


@pytest.mark.parametrize(
    ("slug", "name", "field", "said"),
    [
        ("Bad Slug", "", "slug", "Slug must be"),
        ("", "", "slug", "Slug must be"),
        ("a\0", "", "slug", "Slug must be"),
        ("a" * 65, "", "slug", "Slug must be"),
        ("ok", "\0", "name", "Name must be"),
        ("ok", "x\r\ny", "name", "Name must be"),
        ("ok", "a" * 10_000, "name", "Name must be"),
        ("taken", "", "slug", "A tenant with this slug is there already"),
    ],
)
def test_a_bad_field_comes_back_with_its_value_and_a_sentence(signed_in, slug, name, field, said):
    signed_in.add_tenant("taken")

    answer = signed_in.post("/admin/tenants", slug=slug, name=name)

    assert answer.status_code == 422
    notes = re.search(rf'id="{field}-notes">(.*?)</div>', answer.text, re.DOTALL)[1]
    assert said in words_of(notes)
    assert re.search(rf'id="{field}"[^>]*aria-invalid="true"', answer.text)
    with signed_in.db.read() as session:
        assert session.scalar(select(func.count()).select_from(Tenant)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "<svg/onload=alert(1)>",
        "'\"><h1>",
        '<a hx-get="/admin/keys" hx-trigger="load">x</a>',
        "<style>@import'//evil'</style>",
        "&lt;script&gt;",
        "{{7*7}}",
    ],
)
def test_a_name_is_shown_as_it_was_written_and_never_as_markup(signed_in, name):
    signed_in.post("/admin/tenants", slug="acme", name=name)

    for path in ("/admin/tenants", "/admin/tenants/acme", "/admin/keys"):
        page = signed_in.get(path).text
        assert "49" not in words_of(page)
        if "<" in name or "&" in name:
            assert name not in page
        assert name in words_of(page).replace("&lt;", "<").replace("&gt;", ">").replace(
            "&#39;", "'"
        ).replace("&#34;", '"').replace("&amp;", "&")


def test_suspending_refuses_the_keys_and_activating_takes_them_again(signed_in):
    _, secret = signed_in.add_key(signed_in.add_tenant())

    def is_let_in() -> bool:
        with signed_in.db.read() as session:
            return authenticate(session, secret) is not None

    signed_in.post("/admin/tenants/acme/suspend")
    assert not is_let_in()
    assert "suspended" in words_of(signed_in.get("/admin/tenants/acme").text)

    signed_in.post("/admin/tenants/acme/activate")
    assert is_let_in()


def test_suspending_asks_first(signed_in):
    tenant = signed_in.add_tenant()
    page = signed_in.get("/admin/tenants/acme").text
    [path] = re.findall(r'href="(/admin/tenants/acme/suspend)"', page)

    asked = signed_in.get(path)

    assert f'<form class="actions" method="post" action="{path}">' in asked.text
    assert "suspend" not in "".join(re.findall("<form[^>]*>", page))
    with signed_in.db.read() as session:
        assert find_tenant(session, tenant.slug).status == "active"
    assert signed_in.get("/admin/tenants/nobody/suspend").status_code == 404


@pytest.mark.parametrize("slug", ["nobody", "%00", "' OR 1=1", "a" * 300])
def test_an_unknown_tenant_is_a_page_that_says_so(signed_in, slug):
    answer = signed_in.get(f"/admin/tenants/{slug}")

    assert answer.status_code == 404
    assert "There is no such tenant" in answer.text


def test_what_is_no_form_is_refused(signed_in):
    for content_type in ("text/plain", "application/json", ""):
        answer = signed_in.client.post(
            "/admin/tenants",
            content=b'{"name": "x"}',
            headers={**SAME_ORIGIN, "Content-Type": content_type},
        )
        assert answer.status_code == 415


@pytest.mark.parametrize("body", [b"slug=%ff", b"slug=\xff", b"&".join([b"a=b"] * 200)])
def test_a_form_that_cannot_be_read_is_refused(signed_in, body):
    answer = signed_in.client.post(
        "/admin/tenants",
        content=body,
        headers={**SAME_ORIGIN, "Content-Type": "application/x-www-form-urlencoded"},
    )

    assert answer.status_code == 400
    assert "could not be read" in answer.text
