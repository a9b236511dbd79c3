"""A request's page shows the life that the API tells; the list finds it."""

import re

import pytest

from manylora.engine.errors import EngineOverloadedError
from manylora.engine.lifecycle import StageName, WaitCause
from manylora.platform.lives import Sight
from manylora.web.templating import _interval
from manylora.web.waterfall import stage_rows, wait_rows
from support.site import Site, words_of


def life_of(site: Site, request_id: str):
    life = site.services.lives.find(request_id, Sight())
    assert life is not None
    return life


def test_the_page_shows_each_stage_and_each_wait_of_the_life(signed_in):
    request_id = signed_in.chat(signed_in.add_tenant())
    life = life_of(signed_in, request_id)

    page = signed_in.get(f"/admin/requests/{request_id}")

    assert page.status_code == 200
    stages, waits = re.findall(r'<ol class="waterfall">(.*?)</ol>', page.text, re.DOTALL)
    for stage, row in zip(life["stages"], stages.split("<li>")[1:], strict=True):
        [(name, component)] = re.findall(r"<strong>(.*?)</strong>.*?<code>(.*?)</code>", row)
        assert name.endswith(stage["name"].replace("_", " "))
        assert component == stage["component"]
        assert _interval(stage["since_previous_us"]) in words_of(row)
    assert len(re.findall("<li>", waits)) == 3
    assert "334 µs 33.4 %" in words_of(waits)


def test_the_bars_lie_end_to_end_over_the_whole_width(signed_in):
    request_id = signed_in.chat(signed_in.add_tenant())
    life = life_of(signed_in, request_id)

    page = signed_in.get(f"/admin/requests/{request_id}").text
    stages = page.split('<ol class="waterfall">')[1]
    bars = re.findall(r'<rect class="\w+" x="([\d.]+)" y="0" width="([\d.]+)"', stages)

    total = life["total_us"]
    for (x, width), stage in zip(bars, life["stages"], strict=False):
        start = stage["at_us"] - stage["since_previous_us"]
        assert abs(float(x) - 720 * start / total) <= 2.1
        assert abs(float(width) - 720 * stage["since_previous_us"] / total) <= 2.1


def test_every_stage_and_cause_has_words():
    life = {
        "stages": [
            {"name": name, "at_us": 9, "since_previous_us": 1, "component": "m", "tokens": 1}
            for name in StageName
        ],
        "queue": {"total_us": len(WaitCause), "by_cause": dict.fromkeys(WaitCause, 1)},
    }

    assert len(stage_rows(life)) == len(StageName)
    assert len(list(wait_rows(life))) == len(WaitCause)


def test_a_row_is_named_by_what_happened_in_its_interval():
    """The time before a preemption is running, the one after it waiting; then tokens of both."""
    stages = [
        {"name": "preempted", "at_us": 100, "since_previous_us": 90, "component": "m"},
        {"name": "resumed", "at_us": 130, "since_previous_us": 30, "component": "m"},
        {
            "name": "prefill_chunk",
            "at_us": 150,
            "since_previous_us": 20,
            "component": "m",
            "tokens": 33,
        },
    ]

    rows = stage_rows({"stages": stages})

    assert [(row.name, row.kind, row.start_us, row.length_us) for row in rows] == [
        ("run until preempted", "work", 10, 90),
        ("wait until resumed", "wait", 100, 30),
        ("prefill chunk", "work", 130, 20),
    ]
    assert rows[2].meaning == "33 tokens computed"


def test_each_table_of_requests_leads_to_them_from_its_first_column(signed_in):
    request_id = signed_in.chat(signed_in.add_tenant())

    for path in ("/admin/requests", "/admin/usage", "/admin"):
        table = signed_in.get(path).text.split('<th scope="col">When</th>')[1]
        first_cell = re.search(r"<tbody>\s*<tr>(.*?)</td>", table, re.DOTALL)[1]
        assert f'href="/admin/requests/{request_id}"' in first_cell  # in sight on a telephone, too


def test_the_list_shows_also_what_usage_does_not_and_filters_it(signed_in):
    tenant = signed_in.add_tenant()
    answered = signed_in.chat(tenant)
    signed_in.engine.fails_at, signed_in.engine.error = 0, EngineOverloadedError(1.0)
    refused = signed_in.chat(tenant)

    def shown(query: str) -> list[str]:
        page = signed_in.get(f"/admin/requests{query}")
        assert page.status_code == 200
        return re.findall(r'<code title="(req_\w+)"', page.text)

    assert shown("") == [refused, answered]
    assert shown("?status=refused") == [refused]
    assert shown("?status=running") == []
    assert shown("?status=nonsense&page=%00") == [refused, answered]
    assert shown(f"?page={refused}") == [answered]


def test_older_requests_are_a_page_further(signed_in, monkeypatch):
    monkeypatch.setattr("manylora.web.pages.requests.SHOWN_ROWS", 2)
    tenant = signed_in.add_tenant()
    sent = [signed_in.chat(tenant) for _ in range(3)]

    first = signed_in.get("/admin/requests?status=ok").text
    older = re.search(r'<a href="([^"]+)">Older', first)[1].replace("&amp;", "&")

    assert sent[0] not in first
    assert sent[0] in signed_in.get(older).text


@pytest.mark.parametrize("request_id", ["req_" + "0" * 32, "nonsense", "%00"])
def test_a_request_that_is_not_kept_is_not_found(signed_in, request_id):
    page = signed_in.get(f"/admin/requests/{request_id}")

    assert page.status_code == 404
    assert "older than the 100,000 that are kept" in page.text
