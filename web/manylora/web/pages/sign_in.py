"""`/admin/login` and sign-out."""

import math
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from manylora.platform.api.auth import services_of
from manylora.platform.operators import sign_in, sign_out
from manylora.web.forms import Form, Posted
from manylora.web.page_route import PageRoute
from manylora.web.sessions import (
    LOGIN_PATH,
    clear_session,
    is_local,
    session_token,
    set_session,
)
from manylora.web.templating import render
from manylora.web.throttle import SignInThrottle

router = APIRouter(route_class=PageRoute)

Next = Annotated[str, Query(alias="next")]


@router.get(LOGIN_PATH)
def show(request: Request, next_page: Next = "") -> Response:
    return _page(request, Form(), next_page)


@router.post(LOGIN_PATH)
def enter(request: Request, form: Posted, next_page: Next = "") -> Response:
    """Check the password; every reason to refuse looks the same."""
    throttle: SignInThrottle = request.app.state.sign_in_throttle
    address = request.client.host if request.client else ""
    email, target = form.text("username"), form.text("next") or next_page
    wait = throttle.wait_seconds(address, email)
    if wait > 0:
        minutes = math.ceil(wait / 60)
        form.errors[""] = f"Too many failed sign-ins. Try again in {minutes} min."
        return _page(
            request, form, target, status=429, headers={"retry-after": str(math.ceil(wait))}
        )
    token = sign_in(services_of(request).db, email=email, password=form.text("password"))
    if token is None:
        throttle.failed(address, email)
        form.errors[""] = "No operator has this email and password."
        return _page(request, form, target, status=401)
    response = RedirectResponse(target if is_local(target) else "/admin", status_code=303)
    set_session(request, response, token)
    return response


@router.post("/admin/logout")
def leave(request: Request) -> Response:
    token = session_token(request)
    if token is not None:
        with services_of(request).db.write() as session:
            sign_out(session, token)
    response = RedirectResponse(LOGIN_PATH, status_code=303)
    clear_session(request, response)
    return response


def _page(
    request: Request,
    form: Form,
    target: str,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    values = {"form": form, "next": target if is_local(target) else ""}
    return render(request, "login.html", values, status=status, headers=headers)
