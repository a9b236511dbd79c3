"""Try it: one prompt, answered by an adapter and, beside it, by the base model.

Both run at once, so they usually share the engine's batches. An operator's try is nobody's usage
and leaves no usage row.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from manylora.engine.api import AdapterRef, FinishReason, RequestOutput, SamplingParams
from manylora.engine.api import Request as EngineRequest
from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineError
from manylora.platform.adapters import AdapterView
from manylora.platform.api.auth import services_of
from manylora.platform.api.streaming import ClientGoneError
from manylora.platform.errors import InvalidInputError, envelope, meaning_of
from manylora.platform.ids import new_id
from manylora.web.forms import Form, Posted
from manylora.web.page_route import PageRoute
from manylora.web.pages.adapters import adapter_page, read_adapter, version_of
from manylora.web.templating import is_fragment, render

router = APIRouter(route_class=PageRoute)

MAX_PROMPT_CHARS = 4000
MAX_TOKENS = 96
WATCH_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model said, and what it took; `error` when it could not finish."""

    model: str
    text: str
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    cut: bool  # it had more to say


@router.post("/admin/adapters/{adapter_id}/try")
async def try_it(request: Request, adapter_id: str, form: Posted) -> Response:
    """Answer a prompt; the answers come beside the form, or as a fragment for htmx."""
    view = await run_in_threadpool(read_adapter, request, adapter_id)
    try:
        answers = await _unless_browser_goes(request, _answers(request, view, form))
    except (InvalidInputError, EngineError) as error:
        status = meaning_of(error).status
        form.errors["prompt"] = envelope(error)["error"]["message"]
        return await _reply(request, view, form, (), status=422 if status == 400 else status)
    return await _reply(request, view, form, answers)


async def _unless_browser_goes(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled, and so its requests aborted, when nobody waits."""
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            if await request.is_disconnected():
                raise ClientGoneError
            await asyncio.wait((working,), timeout=WATCH_SECONDS)
        return working.result()
    finally:
        working.cancel()
        await asyncio.wait((working,))


async def _answers(request: Request, view: AdapterView, form: Form) -> Sequence[Answer]:
    services = services_of(request)
    version = version_of(view, form.text("version"))
    messages = [{"role": "user", "content": _prompt(form)}]
    token_ids = tuple(await run_in_threadpool(services.text.encode_chat, messages))
    room = (await services.engine.info()).max_model_len - len(token_ids)
    params = SamplingParams(
        max_tokens=max(1, min(MAX_TOKENS, room)),  # without room the engine says how much it has
        temperature=0,
    )

    def asked(adapter: AdapterRef | None) -> EngineRequest:
        return EngineRequest(
            request_id=new_id("try"),
            prompt_token_ids=token_ids,
            params=params,
            tenant=view.tenant.id,
            adapter=adapter,
        )

    return await asyncio.gather(
        _answer(
            services.engine,
            f"{view.adapter.name}@v{version.number}",
            asked(AdapterRef(version.digest)),
        ),
        _answer(services.engine, services.base_model.name, asked(None)),
    )


async def _answer(engine: EngineClient, model: str, asked: EngineRequest) -> Answer:
    started = time.monotonic()
    whole = RequestOutput(request_id=asked.request_id)
    error = None
    try:
        async for output in engine.generate(asked):
            whole = whole.merged_with(output)
    except EngineError as failure:
        error = str(envelope(failure)["error"]["message"])
    return Answer(
        model=model,
        text=whole.text,
        error=error or whole.error,
        num_prompt_tokens=whole.num_prompt_tokens,
        num_output_tokens=whole.num_output_tokens,
        seconds=time.monotonic() - started,
        cut=whole.finish_reason is FinishReason.LENGTH,
    )


def _prompt(form: Form) -> str:
    prompt = form.text("prompt").replace("\r\n", "\n").strip()
    if not prompt:
        raise InvalidInputError("Write something to answer.", param="prompt")
    if len(prompt) > MAX_PROMPT_CHARS or "\0" in prompt:
        raise InvalidInputError(
            f"A prompt may have {MAX_PROMPT_CHARS} characters and no NUL.", param="prompt"
        )
    return prompt


async def _reply(
    request: Request,
    view: AdapterView,
    form: Form,
    answers: Sequence[Answer],
    *,
    status: int = 200,
) -> Response:
    values = {"trial": answers, "trial_form": form}
    version = form.text("version")
    if is_fragment(request):
        shown = {"view": view, "shown": version_of(view, version)}
        return render(request, "_trial.html", shown | values, status=status)
    return await adapter_page(request, view.adapter.id, values, version=version, status=status)
