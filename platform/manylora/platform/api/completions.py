"""`POST /v1/completions`: a prompt as it stands, text or token ids, without a chat template."""

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from manylora.engine.text.processor import TextProcessor
from manylora.platform.api.admission import Asked, admit
from manylora.platform.api.auth import InferCaller, services_of
from manylora.platform.api.bodies import CompletionBody, Prompt
from manylora.platform.api.body import json_body
from manylora.platform.api.shapes import CompletionShape
from manylora.platform.api.streaming import answer
from manylora.platform.ids import new_id

router = APIRouter()
DEFAULT_MAX_TOKENS = 16  # the OpenAI API's


@router.post("/completions")
async def create_completion(
    http: Request,
    caller: InferCaller,
    body: Annotated[CompletionBody, Depends(json_body(CompletionBody))],
) -> Response:
    """Continue a prompt."""
    text = services_of(http).text
    asked = Asked(
        endpoint="completions",
        body=body,
        prompt_field="prompt",
        tokenise=lambda: _prompt_ids(text, body.prompt),
        token_limit=body.max_tokens,
        default_limit=DEFAULT_MAX_TOKENS,
    )
    generation = await admit(http, caller, asked)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    shape = CompletionShape(
        id=new_id("cmpl").replace("_", "-"),
        created=int(time.time()),
        model=body.model or http.path_params["name"],
        include_usage=include_usage,
    )
    return await answer(
        http, generation, shape, stream=bool(body.stream), include_usage=include_usage
    )


def _prompt_ids(text: TextProcessor, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a list of one
    if isinstance(prompt, str):
        return text.encode(prompt)
    return [token for token in prompt if isinstance(token, int)]
