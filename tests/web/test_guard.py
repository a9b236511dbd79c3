"""Nothing under `/admin` is reached without an operator, nor from another site."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, select, update

from manylora.platform.ids import now_us
from manylora.platform.keys import list_keys
from manylora.platform.models import Session
from manylora.platform.operators import IDLE_US, SLIDE_EVERY_US
from manylora.platform.tenants import find_tenant
from support.site import PASSWORD, SAME_ORIGIN, Site, admin_routes

OPEN = {"/admin/login"}


def test_every_route_but_the_sign_in_needs_an_operator(site):
    for method, path in admin_routes(site):
        answer = site.client.request(method, path, headers=SAME_ORIGIN)

        if path in OPEN:
            assert answer.status_code in (200, 415), path
        else:
            assert answer.status_code == 303, (method, path)
            assert answer.headers["location"].startswith("/admin/login?next="), (method, path)


def test_the_walk_over_the_routes_finds_the_pages(site):
    routes = admin_routes(site)

    assert len(routes) > 20
    for known in (("GET", "/admin"), ("POST", "/admin/keys"), ("GET", "/admin/usage")):
        assert known in routes


def test_every_route_carries_the_security_headers_signed_in_or_not(site):
    for _ in range(2):
        for method, path in set(admin_routes(site)) - {("POST", "/admin/logout")}:
            answer = site.client.request(method, path, headers=SAME_ORIGIN)

            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["vary"] == "HX-Request"
            assert answer.headers["x-request-id"]
        site.sign_in()


@pytest.mark.parametrize("root", ["/behind", "/adm", "/admin"])
def test_behind_a_root_path_the_pages_are_guarded_too(site, root):
    with TestClient(site.app, root_path=root, follow_redirects=False) as client:
        for path in (f"{root}/admin", f"{root}/admin/keys", "/admin", "/admin/keys"):
            assert client.get(path).status_code in (303, 404), path


def test_the_bare_address_leads_to_the_pages(site):
    answer = site.get("/")

    assert (answer.status_code, answer.headers["location"]) == (303, "/admin")


def test_other_paths_are_left_alone(site):
    answer = site.get("/health")

    assert answer.status_code == 200
    assert "content-security-policy" not in answer.headers


def test_neither_a_tenant_key_nor_a_made_up_cookie_opens_a_page(site):
    _, secret = site.add_key(site.add_tenant())

    for headers in (
        {"Authorization": f"Bearer {secret}"},
        {"Cookie": "session=AAAA.BBBB.CCCC"},
        {"Cookie": "manylora-session=AAAA"},
        {"Cookie": f"manylora-session={secret}"},
        {"Cookie": "manylora-session="},
    ):
        answer = site.client.get("/admin", headers=headers)
        assert answer.status_code == 303, headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://testserver"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://testserver.evil.example"},
        {"Origin": "http://testserver:81"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
)
def test_a_form_from_another_site_changes_nothing(site, headers):
    site.sign_in()

    answer = site.client.post("/admin/tenants", data={"slug": "acme"}, headers=headers)

    assert answer.status_code == 403
    with site.db.read() as session:
        assert find_tenant(session, "acme") is None


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://testserver"}, {}]
)
def test_a_form_of_our_own_or_from_no_browser_is_taken(site, headers):
    site.sign_in()

    answer = site.client.post("/admin/tenants", data={"slug": "acme"}, headers=headers)

    assert answer.status_code == 303


def test_a_sign_in_from_another_site_is_refused_too(site):
    answer = site.client.post(
        "/admin/login",
        data={"username": "ada@example.org", "password": PASSWORD},
        headers={"Sec-Fetch-Site": "cross-site"},
    )

    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_htmx_is_led_to_the_sign_in_and_back_to_the_page_it_was_on(site):
    answer = site.get(
        "/admin", hx_request="true", hx_current_url="http://testserver/admin/usage?tenant=acme"
    )

    assert answer.status_code == 204
    assert answer.headers["hx-redirect"] == "/admin/login?next=/admin/usage%3Ftenant%3Dacme"


def test_a_foreign_page_that_htmx_claims_to_be_on_is_not_led_back_to(site):
    for claimed in ("http://evil.example//evil", "http://["):
        answer = site.get("/admin", hx_request="true", hx_current_url=claimed)

        assert answer.headers["hx-redirect"] == "/admin/login?next=/admin"


def test_a_navigation_comes_back_to_where_it_was_going(site):
    answer = site.get("/admin/usage?tenant=acme")

    assert answer.headers["location"] == "/admin/login?next=/admin/usage%3Ftenant%3Dacme"


def idle_expiry(site: Site) -> int:
    with site.db.read() as session:
        return session.scalar(select(Session.idle_expires_at))


def let_pass(site: Site, microseconds: int) -> None:
    """As if the session had been idle for so long."""
    with site.db.write() as session:
        session.execute(update(Session).values(idle_expires_at=now_us() + IDLE_US - microseconds))


@contextmanager
def no_writer(site: Site) -> Iterator[None]:
    """Fail a page that asks for the write lock, which all requests share on SQLite."""

    def refuse(_c, _u, statement, *_):
        assert "IMMEDIATE" not in statement

    event.listen(site.db.engine, "before_cursor_execute", refuse)
    yield
    event.remove(site.db.engine, "before_cursor_execute", refuse)


def test_a_page_waits_for_the_write_lock_only_when_its_session_must_be_written(site):
    site.sign_in()

    with no_writer(site):
        assert site.get("/admin").status_code == 200
    let_pass(site, SLIDE_EVERY_US + 1_000_000)
    before = idle_expiry(site)
    site.get("/admin")

    assert idle_expiry(site) > before


def test_a_page_that_refreshes_itself_keeps_no_session_alive(site):
    site.sign_in()
    let_pass(site, SLIDE_EVERY_US + 1_000_000)
    before = idle_expiry(site)

    with no_writer(site):
        assert site.get("/admin", hx_request="true").status_code == 200

    assert idle_expiry(site) == before


def test_a_host_that_cannot_be_one_is_no_error_of_ours(site):
    site.sign_in()

    for path in ("/admin", "/admin/keys", "/admin/login", "/admin/nothing"):
        assert site.get(path, host="[").status_code < 500, path


def test_static_files_are_open_and_kept_only_under_their_hash(site):
    page = site.get("/admin/login").text
    style = re.search(r'href="(/admin/static/admin.css\?v=[0-9a-f]{12})"', page)[1]

    hashed, plain = site.get(style), site.get("/admin/static/admin.css")

    assert hashed.headers["content-type"].startswith("text/css")
    assert "immutable" in hashed.headers["cache-control"]
    assert plain.headers["cache-control"] == "no-store"
    assert site.get("/admin/static/../app.py").status_code in (303, 404)
    assert site.get("/admin/static/%2e%2e/app.py").status_code == 404


def test_pages_hold_no_inline_script_or_style(site):
    tenant = site.add_tenant()
    site.add_key(tenant)
    upload = site.add_adapter(tenant)
    site.sign_in()

    for path in (
        "",
        "/engine",
        "/tenants/acme",
        f"/adapters/{upload.adapter.id}",
        "/keys",
        "/adapters/upload",
    ):
        page = site.get(f"/admin{path}").text
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page)


def test_no_secret_is_on_any_page_after_its_own(site):
    site.sign_in()
    site.add_tenant()
    made = site.post("/admin/keys", tenant="acme", name="app")
    secret = re.search(r'id="new-key">(ml_\w+)<', made.text)[1]

    assert made.headers["cache-control"] == "no-store"
    assert 'hx-history="false"' in made.text
    for path in ("", "/tenants/acme", "/keys", "/usage"):
        assert secret not in site.get(f"/admin{path}").text
    with site.db.read() as session:
        key_id = list_keys(session)[0].id
    assert site.post(f"/admin/keys/{key_id}/reveal").status_code == 404
