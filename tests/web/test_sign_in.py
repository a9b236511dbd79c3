"""Signing in and out: who may, how often somebody may try, and where it leads."""

import re

import pytest

from support.site import PASSWORD, SAME_ORIGIN


def test_a_session_ends_for_the_server_at_sign_out_and_not_only_for_the_browser(site):
    site.sign_in()
    token = site.client.cookies["manylora-session"]

    answer = site.post("/admin/logout")

    assert answer.status_code == 303
    assert "manylora-session" not in site.client.cookies
    kept = site.client.get("/admin", headers={"Cookie": f"manylora-session={token}"})
    assert kept.status_code == 303


def test_the_cookie_is_out_of_scripts_reach_and_new_at_each_sign_in(site):
    answers = [
        site.client.post(
            "/admin/login",
            data={"username": "ada@example.org", "password": PASSWORD},
            headers={**SAME_ORIGIN, "Cookie": "manylora-session=chosen-by-another"},
        )
        for _ in range(2)
    ]

    first, second = (answer.headers["set-cookie"] for answer in answers)
    for cookie in (first, second):
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert "Path=/" in cookie
        assert "chosen-by-another" not in cookie
    assert first.split(";")[0] != second.split(";")[0]


def test_over_https_the_cookie_is_secure_and_bound_to_the_host(site):
    site.client.base_url = "https://testserver"

    answer = site.post("/admin/login", username="ada@example.org", password=PASSWORD)

    assert answer.headers["set-cookie"].startswith("__Host-")
    assert "Secure" in answer.headers["set-cookie"]
    assert site.get("/admin").status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example",
        "/\\evil.example",
        "/admin\\@evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/admin\r\nX-Evil: 1",
        "/adminevil",
        "/v1/models",
        "/admin/é",
        "",
    ],
)
def test_a_sign_in_leads_to_our_own_pages_only(site, target):
    answer = site.post("/admin/login", username="ada@example.org", password=PASSWORD, next=target)

    assert answer.status_code == 303
    assert answer.headers["location"] == "/admin"


@pytest.mark.parametrize("way", ["form", "query"])
def test_a_sign_in_leads_to_the_page_that_was_asked_for(site, way):
    values = {"username": "ada@example.org", "password": PASSWORD}
    target = "/admin/usage?tenant=acme"

    if way == "form":
        answer = site.post("/admin/login", **values, next=target)
    else:
        answer = site.post("/admin/login?next=/admin/usage%3Ftenant%3Dacme", **values)

    assert answer.headers["location"] == target


def test_every_failed_sign_in_gives_the_same_page(site):
    pages = set()
    for name, password in (
        ("ada@example.org", "wrong"),
        ("nobody", "wrong"),
        ("admin'--", "x"),
        ("admin", "\0"),
        ("admin\0", "x"),
        ("admin", "a" * 20_000),
    ):
        answer = site.post("/admin/login", username=name, password=password)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        pages.add(re.sub(r'(?<=name="username" type="text" value=")[^"]*', "", answer.text))

    assert len(pages) == 1
    assert "wrong" not in pages.pop()


def test_the_field_to_fill_next_has_the_focus(site):
    def focused(page: str) -> list[str]:
        return re.findall(r'<input id="(\w+)"[^>]*\sautofocus', page)

    fresh = site.get("/admin/login").text
    failed = site.post("/admin/login", username="ada@example.org", password="wrong").text
    unnamed = site.post("/admin/login", username="", password="wrong").text

    assert [focused(page) for page in (fresh, failed, unnamed)] == [
        ["username"],
        ["password"],
        ["username"],
    ]
    assert "manylora operator reset-password" in fresh


def test_wrong_passwords_are_throttled_for_that_name_only(site):
    for _ in range(10):
        assert site.post("/admin/login", username="admin", password="x").status_code == 401

    refused = site.post("/admin/login", username="admin", password="x")

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert "Too many failed sign-ins" in refused.text
    site.sign_in()


def test_a_huge_form_is_refused_before_it_is_read(site):
    answer = site.post("/admin/login", username="admin", password="a" * 200_000)

    assert answer.status_code == 413
