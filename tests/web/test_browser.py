"""The operator's work in a real browser, with JavaScript and without."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from manylora.web.templating import STATIC
from support.app import listening
from support.site import EMAIL, PASSWORD, Site

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def address(site: Site) -> Iterator[str]:
    with listening(site.app) as address:
        yield address


@pytest.fixture(params=[True, False], ids=["javascript", "plain"])
def scripted(request: pytest.FixtureRequest) -> bool:
    if request.param and not (STATIC / "htmx.min.js").exists():
        pytest.skip("htmx is not fetched: make fetches it")
    return bool(request.param)


@pytest.fixture
def page(browser: Browser, address: str, scripted: bool) -> Iterator[Page]:
    """A page of a fresh browser; a complaint in its console fails the test."""
    context = browser.new_context(base_url=address, java_script_enabled=scripted)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    yield page
    context.close()
    # The browser itself calls a form that comes back with 422 or 401 an error.
    assert [said for said in complaints if "422" not in said and "401" not in said] == []


def sign_in(page: Page, address: str = "/admin") -> None:
    page.goto(address)
    page.get_by_label("Email").fill(EMAIL)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()


def write_adapter(folder: Path, config: str = '{"r": 8}') -> list[Path]:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return sorted(folder.iterdir())


def test_an_operator_takes_an_adapter_from_the_file_picker_to_an_answer(page, site, tmp_path):
    sign_in(page)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()

    page.get_by_role("link", name="Tenants", exact=True).first.click()
    page.get_by_label("Slug").fill("acme")
    page.get_by_label("Name").fill("Acme <Corp>")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="Acme <Corp>")).to_be_visible()

    page.get_by_role("link", name="New key").click()
    expect(page.get_by_label("Tenant")).to_have_value("acme")
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Create").click()
    secret = page.locator("#new-key").inner_text()
    assert site.client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"}).json()[
        "data"
    ]
    page.get_by_role("link", name="I have copied it").click()
    expect(page.get_by_role("row", name=re.compile("laptop"))).to_be_visible()
    assert secret not in page.content()

    page.get_by_role("link", name="Adapters", exact=True).first.click()
    page.get_by_role("link", name="Upload an adapter").click()
    page.get_by_label("Tenant").select_option("acme")
    page.get_by_label("Adapter name").fill("pirate")
    page.get_by_label("Files").set_input_files(write_adapter(tmp_path / "pirate"))
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_role("heading", name="pirate")).to_be_visible()

    page.get_by_label("Prompt").fill("Who are you?")
    page.get_by_role("button", name="Answer").click()
    digest = hashlib.sha256(b"weights").hexdigest()
    expect(page.locator(".answer")).to_have_text(
        [f"{digest[:8]} one two three", "base one two three"]
    )

    page.get_by_role("link", name="Adapters", exact=True).first.click()
    expect(page.get_by_role("row", name=re.compile("acme.*pirate"))).to_be_visible()


def test_a_refused_upload_says_why_and_keeps_what_was_typed(page, site, tmp_path):
    site.add_tenant("acme")
    files = write_adapter(tmp_path / "bad", config="{}")
    sign_in(page, "/admin/adapters/upload")

    page.get_by_label("Tenant").select_option("acme")
    page.get_by_label("Adapter name").fill("pirate")
    page.get_by_label("Files").set_input_files(files)
    page.get_by_role("button", name="Upload and check").click()

    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("r is missing")
    expect(alert).to_contain_text("nothing else is said either")
    expect(page.get_by_label("Adapter name")).to_have_value("pirate")
    expect(page.get_by_label("Tenant")).to_have_value("acme")


def test_a_second_version_is_kept_looked_at_and_made_live(page, site, tmp_path):
    upload = site.add_adapter(site.add_tenant("acme"))
    sign_in(page, f"/admin/adapters/{upload.adapter.id}")

    page.get_by_role("link", name="Upload a version").click()
    expect(page.get_by_label("Tenant")).to_have_value("acme")
    expect(page.get_by_label("Adapter name")).to_have_value("pirate")
    page.get_by_label("Files").set_input_files(write_adapter(tmp_path / "pirate"))
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_text("is still v1")).to_be_visible()
    expect(page.get_by_role("heading", name="What is applied (v2)")).to_be_visible()

    page.get_by_label("Prompt").fill("Who are you?")
    page.get_by_role("button", name="Answer").click()
    expect(page.get_by_role("heading", name="pirate@v2")).to_be_visible()
    page.get_by_role("link", name="v1", exact=True).click()
    expect(page.get_by_role("heading", name="What is applied (v1)")).to_be_visible()

    page.get_by_role("button", name="Make v2 live").first.click()
    expect(page.get_by_role("heading", name="What is applied (v2)")).to_be_visible()
    expect(page.get_by_text("is still")).not_to_be_visible()


def test_a_key_is_revoked_only_after_the_question(page, site):
    site.add_key(site.add_tenant("acme"), "laptop")
    sign_in(page, "/admin/keys")

    page.get_by_role("link", name="Revoke laptop of acme").click()
    page.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("row", name=re.compile("laptop.*active"))).to_be_visible()
    page.get_by_role("link", name="Revoke laptop of acme").click()
    page.get_by_role("button", name="Revoke").click()

    expect(page.get_by_role("row", name=re.compile("laptop.*revoked"))).to_be_visible()


def test_after_a_wrong_password_only_the_password_is_typed_again(page):
    page.goto("/admin/login")
    page.get_by_label("Email").fill(EMAIL)
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()

    expect(page.get_by_label("Password")).to_be_focused()
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_signing_in_leads_to_the_page_that_was_asked_for_and_out_again(page):
    sign_in(page, "/admin/usage?tenant=acme")
    expect(page).to_have_url(re.compile(r"/admin/usage\?tenant=acme$"))

    page.get_by_role("button", name="Sign out").click()
    page.goto("/admin/usage")

    expect(page).to_have_url(re.compile(r"/admin/login\?next="))


@pytest.mark.parametrize("path", ["/admin", "/admin/engine"])
@pytest.mark.parametrize("scripted", [True], indirect=True)
def test_a_page_about_the_engine_follows_it_by_itself(page, site, path):
    sign_in(page, path)
    expect(page.get_by_role("heading", name="Slot map")).to_be_visible()

    site.engine.alive = False

    expect(page.get_by_text("The engine does not answer.")).to_be_visible(timeout=15_000)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scripted", [False], indirect=True)
def test_no_page_is_wider_than_the_window(page, site, width):
    tenant = site.add_tenant("acme", "A" * 200)
    key, _ = site.add_key(tenant, "k" * 200)
    upload = site.add_adapter(tenant, "p" * 64)
    site.add_usage(key, upload)
    request_id = site.chat(tenant, model="p" * 64)
    page.set_viewport_size({"width": width, "height": 800})
    sign_in(page)

    for path in (
        "",
        "/engine",
        "/tenants",
        "/tenants/acme",
        "/adapters",
        "/adapters/upload",
        f"/adapters/{upload.adapter.id}",
        "/keys",
        f"/keys/{key.id}/revoke",
        "/usage",
        "/requests",
        f"/requests/{request_id}",
    ):
        page.goto(f"/admin{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
