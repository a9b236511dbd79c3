"""The session cookie, and where a sign-in may lead."""

import re

from fastapi import Request
from fastapi.responses import Response

from manylora.platform.operators import ABSOLUTE_US

LOGIN_PATH = "/admin/login"

# `__Host-` binds a cookie to https, this very host and the whole path; over plain http (a
# machine's own localhost) browsers refuse it.
SECURE_COOKIE = "__Host-manylora-session"
PLAIN_COOKIE = "manylora-session"

# Printable ASCII without the backslash, which browsers read as a slash.
_LOCAL = re.compile(r"/admin(?:[/?][!-\[\]-~]*)?")


def is_local(target: str) -> bool:
    """Whether a sign-in may lead there: one of our own pages, by path."""
    return _LOCAL.fullmatch(target) is not None


def session_token(request: Request) -> str | None:
    """The token that the browser brought, live or not."""
    return request.cookies.get(_cookie_name(request)) or None


def set_session(request: Request, response: Response, token: str) -> None:
    response.set_cookie(
        _cookie_name(request),
        token,
        max_age=ABSOLUTE_US // 1_000_000,
        path="/",
        httponly=True,
        samesite="lax",
        secure=_is_https(request),
    )


def clear_session(request: Request, response: Response) -> None:
    response.delete_cookie(
        _cookie_name(request),
        path="/",
        httponly=True,
        samesite="lax",
        secure=_is_https(request),
    )


def _cookie_name(request: Request) -> str:
    return SECURE_COOKIE if _is_https(request) else PLAIN_COOKIE


def _is_https(request: Request) -> bool:
    return request.url.scheme == "https"
