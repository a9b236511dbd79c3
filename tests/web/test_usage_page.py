"""Usage shows the rows and sums that the API counted."""

import re

import pytest

from support.site import Site


@pytest.fixture
def used(signed_in: Site) -> Site:
    acme, globex = signed_in.add_tenant("acme"), signed_in.add_tenant("globex")
    acme_key, globex_key = signed_in.add_key(acme)[0], signed_in.add_key(globex)[0]
    pirate = signed_in.add_adapter(acme, "pirate")
    signed_in.add_usage(acme_key, pirate, prompt_tokens=1000, cached_tokens=300)
    signed_in.add_usage(acme_key, prompt_tokens=200)
    signed_in.add_usage(globex_key, prompt_tokens=30, completion_tokens=7, delivered_tokens=7)
    return signed_in


@pytest.mark.parametrize(
    ("query", "prompt", "cached", "answer", "rows"),
    [
        ("", "1,230", "300", "17", 3),
        ("?tenant=acme", "1,200", "300", "10", 2),
        ("?tenant=acme&adapter=pirate", "1,000", "300", "5", 1),
        ("?tenant=globex", "30", "0", "7", 1),
        ("?tenant=nobody", "0", "0", "0", 0),
        ("?tenant=%00", "0", "0", "0", 0),
        ("?adapter=%25", "0", "0", "0", 0),
    ],
)
def test_sums_and_rows_are_those_of_the_filter(used, query, prompt, cached, answer, rows):
    page = used.get(f"/admin/usage{query}")

    assert page.status_code == 200
    figures = re.findall(r"<dt>(.*?)</dt><dd>([\d,]+)(?:<small>([\d,]+))?", page.text)
    shown = {name: (value, more) for name, value, more in figures}
    assert shown["Prompt tokens"] == (prompt, cached)
    assert shown["Answer tokens"][0] == answer
    assert page.text.count('<code title="req_') == rows


def test_the_sums_say_that_they_are_of_all_time(used):
    assert "of all time" in used.get("/admin/usage").text


def test_an_answer_of_the_api_appears_with_its_own_usage_block(signed_in):
    _, secret = signed_in.add_key(signed_in.add_tenant())
    model = signed_in.services.base_model.name

    usage = signed_in.client.post(
        "/v1/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": "Who?"}]},
        headers={"Authorization": f"Bearer {secret}"},
    ).json()["usage"]

    page = signed_in.get("/admin/usage").text
    row = next(row for row in page.split("<tr>") if '<code title="req_' in row)
    numbers = re.findall(r'<td class="number">([\d,]+)</td>', row)
    assert [int(number) for number in numbers] == [
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    ]
