"""Chat templates: the Jinja source a model brings, rendered in a sandbox.

The environment is the one that transformers gives to templates (`apply_chat_template`), so that a
template written for it renders here to the same characters.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manylora.engine.errors import InvalidRequestError, ModelError

# A body of the largest size accepted (2 MB), rendered, stays far below it; a template that
# multiplies its input does not.
MAX_RENDERED_CHARACTERS = 8 << 20


class ChatTemplate:
    """One compiled template and the special tokens it may name (`bos_token`, ...).

    Raises:
        ModelError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
    ) -> str:
        """The conversation as one string.

        Raises:
            InvalidRequestError: the template refuses the messages, or the result is too long;
                `param` is `messages`.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=[_without_nulls(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise InvalidRequestError("the rendered chat is too long", param="messages")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return "".join(pieces)


def _without_nulls(message: Mapping[str, object]) -> dict[str, object]:
    """Clients send `content: null` where templates expect the key to be missing."""
    return {key: value for key, value in message.items() if value is not None}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks answers for training: its body, as is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates use
    return datetime.now().strftime(format)
