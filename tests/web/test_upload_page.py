"""An adapter comes from the browser, or is refused with every reason."""

import re
from contextlib import AsyncExitStack

import pytest
from starlette.datastructures import FormData

from manylora.platform import registry
from manylora.platform.adapters import find_adapter_named
from support.site import SAME_ORIGIN, Site, words_of


def upload(site: Site, weights: bytes = b"w", config: bytes = b'{"r": 8}', **values: str):
    """The form as a browser sends it."""
    files = [
        ("files", ("adapter_config.json", config)),
        ("files", ("adapter_model.safetensors", weights)),
    ]
    return site.client.post("/admin/adapters/upload", data=values, files=files, headers=SAME_ORIGIN)


def test_an_adapter_that_passes_can_be_called(signed_in):
    tenant = signed_in.add_tenant()
    _, secret = signed_in.add_key(tenant)

    answer = upload(signed_in, tenant="acme", name="pirate")

    assert answer.status_code == 303
    page = signed_in.get(answer.headers["location"])
    assert "passed its check" in page.text
    models = signed_in.get("/v1/models", authorization=f"Bearer {secret}").json()["data"]
    assert "pirate" in [model["id"] for model in models]


def test_with_htmx_the_browser_is_led_to_the_adapter(signed_in):
    signed_in.add_tenant()
    signed_in.client.headers["HX-Request"] = "true"

    answer = upload(signed_in, tenant="acme", name="pirate")

    assert answer.status_code == 204
    assert answer.headers["hx-redirect"].startswith("/admin/adapters/adp_")


@pytest.mark.parametrize("htmx", [True, False])
def test_a_refusal_shows_every_reason_and_keeps_what_was_typed(signed_in, htmx):
    signed_in.add_tenant()
    if htmx:
        signed_in.client.headers["HX-Request"] = "true"

    answer = upload(signed_in, config=b"{}", tenant="acme", name="pirate")

    assert answer.status_code == 422
    assert "r is missing" in answer.text
    assert "nothing else is said either" in answer.text
    assert 'value="pirate"' in answer.text
    assert '<option value="acme" selected>' in answer.text
    assert ("<html" in answer.text) != htmx


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"tenant": "", "name": "pirate"}, "tenant", "Choose the tenant"),
        ({"tenant": "nobody", "name": "pirate"}, "tenant", "no such tenant"),
        ({"tenant": "acme", "name": "../etc"}, "name", "Name must be"),
        ({"tenant": "acme", "name": "a\0"}, "name", "Name must be"),
        ({"tenant": "acme"}, "name", "Name must be"),
    ],
)
def test_a_bad_field_is_told_beside_it(signed_in, values, field, said):
    signed_in.add_tenant()

    answer = upload(signed_in, **values)

    assert answer.status_code == 422
    notes = re.search(rf'id="{field}-notes">(.*?)</div>', answer.text, re.DOTALL)[1]
    assert said in words_of(notes)


def test_files_that_are_missing_unknown_or_too_large_are_named(signed_in):
    signed_in.add_tenant()
    values = {"tenant": "acme", "name": "pirate"}
    config = ("files", ("adapter_config.json", b'{"r": 8}'))

    def send(*files):
        return signed_in.client.post(
            "/admin/adapters/upload", data=values, files=files, headers=SAME_ORIGIN
        )

    missing = send(config)
    unknown = send(config, ("files", ("../../evil.sh", b"x")))
    large = send(config, ("files", ("adapter_model.safetensors", b"x" * (3 << 20))))

    assert (missing.status_code, unknown.status_code, large.status_code) == (422, 422, 413)
    assert "adapter_model.safetensors is missing" in words_of(missing.text)
    assert "only these are taken" in words_of(unknown.text)
    assert "large" in words_of(large.text)


def test_the_limits_are_stated_before_the_try(signed_in):
    page = words_of(signed_in.get("/admin/adapters/upload").text)

    assert "1 MiB all together" in page
    assert "up to 64" in page


def test_a_known_name_gets_a_version_and_live_stays_unless_asked(signed_in):
    tenant = signed_in.add_tenant()

    upload(signed_in, b"one", tenant="acme", name="pirate")
    upload(signed_in, b"two", tenant="acme", name="pirate")
    with signed_in.db.read() as session:
        assert find_adapter_named(session, tenant.id, "pirate").live.number == 1

    upload(signed_in, b"three", tenant="acme", name="pirate", promote="true")
    with signed_in.db.read() as session:
        assert find_adapter_named(session, tenant.id, "pirate").live.number == 3


def test_a_version_that_does_not_go_live_says_so_and_how_to_call_it(signed_in):
    signed_in.add_tenant()

    def words_after(weights: bytes, **values: str) -> str:
        answer = upload(signed_in, weights, tenant="acme", name="pirate", **values)
        return words_of(signed_in.get(answer.headers["location"]).text)

    first, kept = words_after(b"one"), words_after(b"two")
    known, promoted = words_after(b"two"), words_after(b"three", promote="true")

    for live in (first, promoted):
        assert "can be called now" in live
        assert "is still" not in live
    for not_live in (kept, known):
        assert "can be called now" not in not_live
        assert "live is still v1. Call v2 as pirate@v2 , or make it live." in not_live
    assert "passed its check and was kept" in kept
    assert "there already" in known


def test_uploading_a_version_starts_with_the_adapters_tenant_and_name(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    page = signed_in.get(f"/admin/adapters/{upload.adapter.id}").text

    link = re.search(r'href="([^"]+)">Upload a version', page)[1].replace("&amp;", "&")
    form = signed_in.get(link).text

    assert '<option value="acme" selected>' in form
    assert re.search(r'id="name"[^>]* value="pirate"', form)


def test_the_spooled_files_are_closed_whatever_came_of_them(signed_in, monkeypatch):
    signed_in.add_tenant()
    closed = []
    close = FormData.close

    async def note(form):
        closed.append(form)
        await close(form)

    monkeypatch.setattr(FormData, "close", note)

    upload(signed_in, tenant="acme", name="pirate")
    upload(signed_in, config=b"{}", tenant="acme", name="pirate")

    files = [form["files"].file for form in closed]
    assert [file.closed for file in files] == [True, True]


def test_one_upload_too_many_is_asked_to_come_back(signed_in, monkeypatch):
    monkeypatch.setattr(registry, "UPLOAD_PATIENCE_SECONDS", 0.05)
    signed_in.add_tenant()
    others = AsyncExitStack()

    async def crowd():
        for _ in range(registry.MAX_UPLOADS):
            await others.enter_async_context(signed_in.services.adapters.turn())

    signed_in.client.portal.call(crowd)
    refused = upload(signed_in, tenant="acme", name="pirate")
    signed_in.client.portal.call(others.aclose)

    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "Too many uploads" in words_of(refused.text)
    assert upload(signed_in, tenant="acme", name="pirate").status_code == 303
