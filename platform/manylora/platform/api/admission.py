"""From a checked body to an engine request: the route, the prompt's tokens, the room left."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from anyio.to_thread import run_sync
from fastapi import Request as HttpRequest

from manylora.engine.api import AdapterRef, Request, SamplingParams
from manylora.engine.lifecycle import Stage, StageName
from manylora.engine.text.processor import TextProcessor
from manylora.platform import routing
from manylora.platform.api.auth import Caller, services_of
from manylora.platform.api.bodies import SamplingBody
from manylora.platform.errors import InvalidInputError
from manylora.platform.generation import Generation
from manylora.platform.life import Life
from manylora.platform.metrics import RequestMeter
from manylora.platform.routing import Route
from manylora.platform.services import Services

CONTEXT_EXCEEDED = "context_length_exceeded"
# Fields that mean to the engine what they mean in the body; absent or null is its default.
_AS_ASKED = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one endpoint makes of its body."""

    endpoint: str  # "chat" or "completions"
    body: SamplingBody
    prompt_field: str
    tokenise: Callable[[], Sequence[int]]  # the prompt's token ids; run off the event loop
    token_limit: int | None  # the most tokens to generate, if the body says so
    default_limit: int | None = None  # the same where it does not; None: what the context leaves


async def admit(http: HttpRequest, caller: Caller, asked: Asked) -> Generation:
    """The generation that a body asks for, not begun.

    Raises:
        ModelNotFoundError, InvalidInputError, EngineUnavailableError
    """
    services, body = services_of(http), asked.body
    route = await run_sync(route_of, services, caller, http.path_params.get("name"), body.model)
    prompt = tuple(await run_sync(asked.tokenise))
    _check_token_ids(prompt, services.text.vocab_size, asked.prompt_field)
    _check_token_ids(body.stop_token_ids or (), services.text.vocab_size, "stop_token_ids")
    _check_token_ids(map(int, body.logit_bias or ()), services.text.vocab_size, "logit_bias")
    life = _life(http, caller, route, asked, len(prompt))
    info = await services.engine.info()
    request = Request(
        request_id=http.state.request_id,
        prompt_token_ids=prompt,
        params=_sampling(body, _limit(asked, len(prompt), info.max_model_len)),
        tenant=caller.tenant.id,
        adapter=AdapterRef(route.digest) if route.digest else None,
        priority=_priority(body, info.scheduling_policy),
        cache_salt=body.cache_salt,
    )
    return Generation(
        engine=services.engine,
        db=services.db,
        request=request,
        life=life,
        meter=RequestMeter(
            services.metrics, tenant=life.tenant, max_tokens=request.params.max_tokens
        ),
    )


def _life(
    http: HttpRequest, caller: Caller, route: Route, asked: Asked, num_prompt_tokens: int
) -> Life:
    """Begin it: from here on whatever becomes of the request can be looked up."""
    state = http.state
    tokenised = Stage(StageName.TOKENISED, time.monotonic(), TextProcessor.__module__)
    life = state.life = Life(
        request_id=state.request_id,
        tenant_id=caller.tenant.id,
        tenant=caller.tenant.slug,
        key_id=caller.key.id,
        endpoint=asked.endpoint,
        route=route,
        num_prompt_tokens=num_prompt_tokens,
        received_at=state.received_at,
        stages=[state.received, tokenised],
        trace_headers=_trace_headers(http),
    )
    services_of(http).lives.begin(life)
    return life


def _trace_headers(http: HttpRequest) -> dict[str, str]:
    """W3C trace context, where the client sent one; of two lines, joined, nothing can be read."""
    lines = {name: http.headers.getlist(name) for name in ("traceparent", "tracestate")}
    return {name: ",".join(values) for name, values in lines.items() if values}


def _priority(body: SamplingBody, policy: str) -> int:
    if body.priority and policy != "priority":
        raise InvalidInputError(
            f"priority counts only under the scheduling policy 'priority'; this is '{policy}'",
            param="priority",
        )
    return body.priority or 0


def route_of(services: Services, caller: Caller, name: str | None, model: str | None) -> Route:
    """Where the request goes; `name` is the adapter of its own base URL, where it is one."""
    with services.db.read() as session:
        if name is not None:
            # First: to a tenant without this adapter, its URL does not exist.
            routing.resolve_adapter(session, caller.tenant.id, services.base_model, name)
            model = routing.within_adapter(name, model)
        if model is None:
            raise InvalidInputError("model: Field required", param="model")
        return routing.resolve(session, caller.tenant.id, services.base_model, model)


def _check_token_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    if any(token >= vocab_size for token in ids):
        raise InvalidInputError(
            f"{field} has a token id outside the vocabulary of {vocab_size}", param=field
        )


def _limit(asked: Asked, num_prompt_tokens: int, context: int) -> int:
    """The most tokens to generate."""
    field = asked.prompt_field
    left = context - num_prompt_tokens
    if left < 1:
        raise InvalidInputError(
            f"This model's maximum context length is {context} tokens, but your prompt ({field}) "
            f"is {num_prompt_tokens} tokens long; shorten it.",
            param=field,
            code=CONTEXT_EXCEEDED,
        )
    if asked.token_limit is None:
        return min(left, asked.default_limit or left)
    if asked.token_limit > left:
        limit_field = "max_tokens" if asked.body.max_tokens else "max_completion_tokens"
        raise InvalidInputError(
            f"This model's maximum context length is {context} tokens. Your prompt ({field}) takes "
            f"{num_prompt_tokens} of them and {limit_field} asks for {asked.token_limit} more; "
            f"lower it to {left}.",
            param=limit_field,
            code=CONTEXT_EXCEEDED,
        )
    return asked.token_limit


def _sampling(body: SamplingBody, max_tokens: int) -> SamplingParams:
    stop = body.stop if body.stop is not None else ()
    asked = {name: value for name in _AS_ASKED if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=body.top_k or 0,
        stop=stop,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        **asked,
    )
