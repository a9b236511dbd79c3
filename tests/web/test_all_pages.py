"""What holds for every page."""

import re
from itertools import pairwise

from support.site import SAME_ORIGIN


def test_an_unknown_page_says_so_whatever_the_method(signed_in):
    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = signed_in.client.request(method, "/admin/nothing/here", headers=SAME_ORIGIN)
        assert answer.status_code == 404
        assert "is not a page of this server" in answer.text


def test_every_page_has_one_title_and_headings_without_gaps(signed_in):
    tenant = signed_in.add_tenant()
    key, _ = signed_in.add_key(tenant)
    upload = signed_in.add_adapter(tenant)
    request_id = signed_in.chat(tenant)

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
        "/tenants/acme/suspend",
        "/usage",
        "/requests",
        f"/requests/{request_id}",
        "/login",
    ):
        page = signed_in.get(f"/admin{path}").text
        levels = [int(level) for level in re.findall(r"<h(\d)", page)]
        assert levels.count(1) == 1, path
        assert levels[0] == 1, path
        assert all(below <= above + 1 for above, below in pairwise(levels))
        labelled = set(re.findall(r'<label for="([^"]+)"', page))
        fields = re.findall(r'<(?:input|select|textarea) id="([^"]+)"', page)
        assert set(fields) <= labelled, path
        ids = re.findall(r'\sid="([^"]+)"', page)
        assert len(ids) == len(set(ids)), path
