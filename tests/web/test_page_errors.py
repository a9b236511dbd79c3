"""What fails behind a page is told on a page; no page holds up the others."""

import asyncio
from collections.abc import Callable
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from manylora.web.forms import CONTENT_TYPE
from support.site import SAME_ORIGIN, Site, admin_routes


def broken(site: Site, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A database that does not answer."""

    @contextmanager
    def fail():
        raise OperationalError("SELECT secret", {}, Exception("no route to host"))
        yield

    for name in names:
        monkeypatch.setattr(site.db, name, fail)


def test_without_a_database_every_page_says_so_and_lets_nobody_in(signed_in, monkeypatch):
    broken(signed_in, monkeypatch, "read", "write")

    for method, path in set(admin_routes(signed_in)) - {("GET", "/admin/login")}:
        answer = signed_in.client.request(
            method, path, headers={**SAME_ORIGIN, "Content-Type": CONTENT_TYPE}
        )
        assert answer.status_code == 503, (method, path)
        assert "The database does not answer." in answer.text or method == "HEAD"
        assert "secret" not in answer.text
        assert answer.headers["cache-control"] == "no-store"


def test_a_page_whose_own_query_fails_says_so(signed_in, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("SELECT secret", {}, Exception("no route to host"))

    monkeypatch.setattr("manylora.web.pages.usage.recent", fail)

    whole, part = (signed_in.get("/admin/usage", hx_request=htmx) for htmx in ("false", "true"))

    assert (whole.status_code, part.status_code) == (503, 503)
    assert "The database does not answer." in whole.text
    assert "The database does not answer." in part.text
    assert ("<html" in whole.text, "<html" in part.text) == (True, False)


def test_a_bug_is_told_to_people_as_a_page_and_to_programs_as_json(signed_in, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("manylora.web.pages.usage.recent", fail)
    monkeypatch.setattr("manylora.platform.api.auth.keys.is_well_formed", fail)
    with TestClient(signed_in.app, raise_server_exceptions=False) as client:
        client.cookies = signed_in.client.cookies
        page = client.get("/admin/usage")
        answer = client.get("/v1/models", headers={"Authorization": "Bearer x"})

    assert (page.status_code, answer.status_code) == (500, 500)
    assert "Something went wrong here" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-request-id"].startswith("req_")
    assert "secret" not in page.text
    assert answer.json()["error"]["code"] == "internal_error"


def test_no_page_reads_the_database_on_the_event_loop(signed_in, monkeypatch):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    paths = {path.replace("{adapter_id}", upload.adapter.id) for _, path in admin_routes(signed_in)}

    def off_the_loop(hand_out: Callable):
        def checked():
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            return hand_out()

        return checked

    monkeypatch.setattr(signed_in.db, "read", off_the_loop(signed_in.db.read))
    monkeypatch.setattr(signed_in.db, "write", off_the_loop(signed_in.db.write))
    for path in sorted(paths - {"/admin/logout"}):
        for answer in (signed_in.get(path), signed_in.post(path, prompt="x", confirm="no")):
            assert answer.status_code < 500, path
