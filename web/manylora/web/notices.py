"""What a page says about the action that led to it: a name in the URL, the words here."""

from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse

NOTICES = {
    "tenant-created": "The tenant was created. Give it a key, or upload its first adapter.",
    "tenant-suspended": "The tenant is suspended: its keys are refused from now on.",
    "tenant-activated": "The tenant is active again.",
    "adapter-uploaded": "The adapter passed its check and can be called now.",
    "version-kept": "The version passed its check and was kept.",
    "adapter-known": "These very weights were there already as this version.",
    "adapter-deleted": "The adapter was deleted.",
    "alias-moved": "The alias points to the version that you chose.",
    "key-revoked": "The key was revoked: it is refused from now on.",
}


def to_page(path: str, notice: str, **query: int) -> RedirectResponse:
    """Lead to a page, after something was done, with a word about it; `query` is the page's own."""
    assert notice in NOTICES
    return RedirectResponse(f"{path}?{urlencode({'notice': notice, **query})}", status_code=303)


def notice_of(request: Request) -> str | None:
    """The words that belong to the name in the URL; unknown names say nothing."""
    return NOTICES.get(request.query_params.get("notice", ""))
