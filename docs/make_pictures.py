"""Take the pictures of README and docs from a running `make serve`.

    .venv/bin/python docs/make_pictures.py [data/demo.json]

Needs Debian's chromium. One question goes to the base and two adapters of one tenant at the same
time; then the overview page is taken, which shows them, and the page of the last of them.
"""

import html
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTION = "Why is the sky blue?"
STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; margin: 0; padding: 24px; width: 752px;
       background: #f5f6f8; color: #1f2430 }
p { border-radius: 12px; padding: 10px 16px; margin: 0 0 14px; width: fit-content; max-width: 78% }
.user { background: #0c6f68; color: white; margin-left: auto }
.model { background: white; border: 1px solid #dcdfe6 }
b { display: block; font-size: 13px; color: #5b6472 }
"""


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("data/demo.json")
    demo = json.loads(path.read_text())
    tenant = demo["tenants"][0]
    models = [demo["base_model"], *tenant["adapters"]]
    client = OpenAI(base_url=f"{demo['base_url']}/v1", api_key=tenant["key"])
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda model: ask(client, model), models))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        picture_chat(browser.new_page(viewport={"width": 800, "height": 100}), models, answers)
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        picture_overview(page, demo)
        picture_request(page, demo)
        browser.close()


def ask(client: OpenAI, model: str) -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=0,
    )
    choice = completion.choices[0]
    cut = " …" if choice.finish_reason == "length" else ""
    return (choice.message.content or "") + cut


def picture_chat(page: Page, models: list[str], answers: list[str]) -> None:
    said = "".join(
        f'<p class="model"><b>{html.escape(model)}</b>{html.escape(answer)}</p>'
        for model, answer in zip(models, answers, strict=True)
    )
    page.set_content(f'<style>{STYLE}</style><p class="user">{html.escape(QUESTION)}</p>{said}')
    page.screenshot(path=str(IMAGES / "chat.png"), full_page=True)


def picture_overview(page: Page, demo: dict[str, Any]) -> None:
    page.goto(f"{demo['base_url']}/admin")
    page.fill("[name=username]", demo["admin"]["email"])
    page.fill("[name=password]", demo["admin"]["password"])
    page.click("form button")
    page.wait_for_url("**/admin")
    page.wait_for_timeout(500)
    page.screenshot(path=str(IMAGES / "overview.png"), full_page=True)


def picture_request(page: Page, demo: dict[str, Any]) -> None:
    page.goto(f"{demo['base_url']}/admin/requests")
    page.click("tbody code")
    page.wait_for_url("**/admin/requests/req_*")
    page.screenshot(path=str(IMAGES / "request.png"), full_page=True)


if __name__ == "__main__":
    main()
