"""`POST /v1/chat/completions`."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from manylora.platform.api.admission import Asked, admit
from manylora.platform.api.auth import InferCaller, services_of
from manylora.platform.api.bodies import ChatBody
from manylora.platform.api.body import json_body
from manylora.platform.api.shapes import ChatShape
from manylora.platform.api.streaming import answer
from manylora.platform.ids import new_id

router = APIRouter()


@router.post("/chat/completions")
async def create_chat_completion(
    http: Request,
    caller: InferCaller,
    body: Annotated[ChatBody, Depends(json_body(ChatBody))],
) -> Response:
    """Answer a chat."""
    text = services_of(http).text
    messages = [message.for_template() for message in body.messages]
    asked = Asked(
        endpoint="chat",
        body=body,
        prompt_field="messages",
        tokenise=lambda: text.encode_chat(messages),
        token_limit=body.token_limit,
    )
    generation = await admit(http, caller, asked)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    shape = ChatShape(
        id=new_id("chatcmpl").replace("_", "-"),
        created=int(time.time()),
        model=body.model or http.path_params["name"],
        include_usage=include_usage,
    )
    return await answer(
        http, generation, shape, stream=bool(body.stream), include_usage=include_usage
    )
