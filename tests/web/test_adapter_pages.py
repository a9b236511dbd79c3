"""Adapters are shown, tried, moved and deleted."""

import json
import re
import time

import httpx
import pytest
from sqlalchemy import func, select

from manylora.engine.api import EngineStats, SlotStats
from manylora.engine.errors import RequestFailedError
from manylora.platform.adapters import find_adapter_named
from manylora.platform.models import UsageRecord
from support.app import listening
from support.site import REPORT, SAME_ORIGIN, words_of


def test_each_adapter_shows_where_the_engine_holds_it(signed_in):
    tenant = signed_in.add_tenant()
    digests = [
        signed_in.add_adapter(tenant, name, name.encode()).version.digest
        for name in ("first", "second", "third")
    ]
    signed_in.engine.snapshot = EngineStats(
        slots=(SlotStats(slot=0), SlotStats(slot=1, digest=digests[0], holds=2)),
        host_digests=(digests[0], digests[1]),
    )

    rows = signed_in.get("/admin/adapters").text.split("<tr>")

    where = {
        name: next(words_of(row) for row in rows if f">{name}<" in row)
        for name in ("first", "second", "third")
    }
    assert "slot 1" in where["first"]
    assert "host memory" in where["second"]
    assert "on disk" in where["third"]


def test_live_moves_to_the_chosen_version_unless_it_moved_meanwhile(signed_in):
    tenant = signed_in.add_tenant()
    adapter = signed_in.add_adapter(tenant, weights=b"1").adapter
    signed_in.add_adapter(tenant, weights=b"2")
    path = f"/admin/adapters/{adapter.id}/alias"

    moved = signed_in.post(path, alias="live", version="2", expected_version="1")
    stale = signed_in.post(path, alias="live", version="1", expected_version="1")
    wrong = signed_in.post(path, alias="live", version="٣", expected_version="1")

    assert (moved.status_code, stale.status_code, wrong.status_code) == (303, 409, 400)
    with signed_in.db.read() as session:
        assert find_adapter_named(session, tenant.id, "pirate").live.number == 2


def test_the_chosen_version_is_what_the_page_reports_tries_and_calls(signed_in):
    tenant = signed_in.add_tenant()
    first = signed_in.add_adapter(tenant, weights=b"1")
    second = signed_in.add_adapter(tenant, weights=b"2")
    path = f"/admin/adapters/{first.adapter.id}"

    pages = {number: signed_in.get(f"{path}?version={number}").text for number in (1, 2)}

    assert words_of(signed_in.get(path).text) == words_of(pages[1])
    for number, upload in ((1, first), (2, second)):
        page = pages[number]
        assert f"What is applied (v{number})" in page
        assert f"<dt>Digest</dt><dd><code>{upload.version.digest}<" in page
        assert f'<option value="{number}" selected>' in page
        assert f'href="{path}?version={number}" aria-current="true"' in page
        assert page.count(' aria-current="true">v') == 1
    models = [re.search(r'{"model": "([^"]+)"', page)[1] for page in pages.values()]
    assert models == ["pirate", "pirate@v2"]


def test_a_try_of_another_version_stays_at_that_version(signed_in):
    tenant = signed_in.add_tenant()
    adapter = signed_in.add_adapter(tenant, weights=b"1").adapter
    second = signed_in.add_adapter(tenant, weights=b"2").version

    answer = signed_in.post(f"/admin/adapters/{adapter.id}/try", prompt="Who?", version="2")

    assert f'<div class="answer">{second.digest[:8]} ' in answer.text
    assert "What is applied (v2)" in answer.text


@pytest.mark.parametrize("version", ["3", "0", "-1", "x", "%00", "٢", "9" * 400])
def test_a_version_that_is_not_there_is_said_to_be_missing(signed_in, version):
    upload = signed_in.add_adapter(signed_in.add_tenant())

    answer = signed_in.get(f"/admin/adapters/{upload.adapter.id}?version={version}")

    assert answer.status_code == 404
    assert "no such version" in answer.text


def test_the_call_shown_is_a_short_repeatable_one(signed_in):
    tenant = signed_in.add_tenant()
    upload = signed_in.add_adapter(tenant)
    _, secret = signed_in.add_key(tenant)

    page = signed_in.get(f"/admin/adapters/{upload.adapter.id}").text

    body = json.loads(re.search(r"-d '(.*?)'</code>", page)[1].replace("&#34;", '"'))
    assert (body["max_tokens"], body["temperature"]) == (64, 0)
    answer = signed_in.client.post(
        "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
    )
    assert answer.status_code == 200


def test_one_adapter_has_one_size_wherever_it_is(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    digest = upload.version.digest
    signed_in.engine.snapshot = EngineStats(
        slots=(SlotStats(slot=0, digest=digest, size_bytes=REPORT["size_bytes"]),),
    )

    for path in ("", "/adapters", "/tenants/acme", f"/adapters/{upload.adapter.id}"):
        assert "900 KiB" in words_of(signed_in.get(f"/admin{path}").text), path


def test_deleting_needs_the_name(signed_in):
    tenant = signed_in.add_tenant()
    adapter = signed_in.add_adapter(tenant).adapter
    path = f"/admin/adapters/{adapter.id}"

    assert signed_in.post(f"{path}/delete", confirm="Pirate").status_code == 422
    assert signed_in.get(path).status_code == 200

    assert signed_in.post(f"{path}/delete", confirm="pirate").status_code == 303
    assert signed_in.get(path).status_code == 404


def test_trying_it_puts_the_adapter_beside_the_base_and_leaves_no_usage(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    signed_in.engine.words = (" <b>ahoy</b>",)
    digest = upload.version.digest

    answer = signed_in.post(f"/admin/adapters/{upload.adapter.id}/try", prompt="Who?\r\nYou?")

    assert answer.status_code == 200
    texts = re.findall(r'<div class="answer">(.*?)</div>', answer.text, re.DOTALL)
    assert texts == [f"{digest[:8]} &lt;b&gt;ahoy&lt;/b&gt;", "base &lt;b&gt;ahoy&lt;/b&gt;"]
    asked = {r.adapter.digest if r.adapter else None: r for r in signed_in.engine.requests}
    assert set(asked) == {digest, None}
    expected = signed_in.services.text.encode_chat([{"role": "user", "content": "Who?\nYou?"}])
    for request in asked.values():
        assert request.prompt_token_ids == tuple(expected)
        assert request.tenant == upload.adapter.tenant_id
    with signed_in.db.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageRecord)) == 0


def test_trying_it_with_htmx_brings_only_its_own_part(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    signed_in.client.headers["HX-Request"] = "true"

    answer = signed_in.post(f"/admin/adapters/{upload.adapter.id}/try", prompt="Who?")

    assert answer.text.lstrip().startswith('<section class="panel" id="trial"')


@pytest.mark.parametrize("prompt", ["", "  ", "a" * 4001, "a\0b"])
def test_a_prompt_that_cannot_be_answered_comes_back(signed_in, prompt):
    upload = signed_in.add_adapter(signed_in.add_tenant())

    answer = signed_in.post(f"/admin/adapters/{upload.adapter.id}/try", prompt=prompt)

    assert answer.status_code == 422
    assert 'id="prompt-notes"' in answer.text
    assert signed_in.engine.requests == []


def test_a_failing_engine_is_told_in_the_answer(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    path = f"/admin/adapters/{upload.adapter.id}/try"
    signed_in.engine.fails_at, signed_in.engine.error = 1, RequestFailedError("secret path")

    failed = signed_in.post(path, prompt="Who?")
    signed_in.engine.alive = False
    gone = signed_in.post(path, prompt="Who?")

    assert failed.status_code == 200
    assert "could not finish this request" in failed.text
    assert "secret path" not in failed.text
    assert gone.status_code == 503
    assert "engine is not available" in gone.text


def test_a_try_that_nobody_waits_for_is_aborted(signed_in):
    upload = signed_in.add_adapter(signed_in.add_tenant())
    signed_in.engine.stalls_at = 1
    cookies = {"manylora-session": signed_in.client.cookies["manylora-session"]}

    with listening(signed_in.app) as address:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{address}/admin/adapters/{upload.adapter.id}/try",
                data={"prompt": "Who?"},
                headers=SAME_ORIGIN,
                cookies=cookies,
                timeout=1,
            )
        deadline = time.monotonic() + 10
        while len(signed_in.engine.aborted) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)

    assert len(signed_in.engine.stalled) == 2
    assert set(signed_in.engine.aborted) == set(signed_in.engine.stalled)


@pytest.mark.parametrize("path", ["", "/try", "/alias", "/delete"])
def test_an_unknown_adapter_is_nowhere(signed_in, path):
    for adapter_id in ("adp_0", "%00"):
        url = f"/admin/adapters/{adapter_id}{path}"
        answer = signed_in.post(url, prompt="x") if path else signed_in.get(url)
        assert answer.status_code == 404
