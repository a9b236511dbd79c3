"""The tokenizer and chat template of a model folder."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from manylora.engine.errors import InvalidRequestError, ModelError
from manylora.engine.text.control_tokens import ControlTokens, without_marks
from manylora.engine.text.detokenizer import Detokenizer
from manylora.engine.text.template import ChatTemplate

# The names under which a template finds special tokens, as in transformers.
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TextProcessor:
    """Tokenizer and chat template of one model folder. Safe to use from several threads.

    Attributes:
        has_tokenizer: whether there is one. Without it only token ids can be served, and every
            method that needs text raises InvalidRequestError.
        vocab_size: how many token ids the model knows.
        eos_token_ids: the ids that end an answer.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.has_tokenizer = tokenizer is not None
        self._loaded_tokenizer = tokenizer
        self._template = template
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._control = ControlTokens(
            token.content for token in added.values() if _is_control(token, template)
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "TextProcessor":
        """Read `tokenizer.json`, `chat_template.jinja` and the configs of a Hugging Face folder.

        Raises:
            ModelError: a file is damaged, or the folder says nowhere how many token ids there are.
        """
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(tokenizer_config, _read_json(folder / "special_tokens_map.json"))
        config = _read_json(folder / "config.json")
        tokenizer = _load_tokenizer(folder / "tokenizer.json")
        generation_config = _read_json(folder / "generation_config.json")
        source = _template_source(folder, tokenizer_config)
        return cls(
            vocab_size=_vocab_size(folder, config, tokenizer),
            eos_token_ids=_eos_token_ids(
                (config, generation_config), tokenizer, special.get("eos_token")
            ),
            tokenizer=tokenizer,
            template=None if source is None else ChatTemplate(source, special),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; control tokens in it count as such.

        Raises:
            InvalidRequestError: no tokenizer, or text that is not valid Unicode.
        """
        return _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the model's template writes it.

        Raises:
            InvalidRequestError: no template, or it refuses the messages; `param` is `messages`.
        """
        marked = self._render_marked(messages, add_generation_prompt=add_generation_prompt)
        return without_marks(marked)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the rendered conversation.

        Only the template writes control tokens; those that a client writes in a message are
        encoded as the characters they are.

        Raises:
            InvalidRequestError: as `render_chat` and `encode`.
        """
        marked = self._render_marked(messages, add_generation_prompt=add_generation_prompt)
        first, *others = self._control.split(marked) or [("", False)]
        token_ids = self._encode_piece(*first)
        for piece in others:
            token_ids += self._encode_continuation(*piece)
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids the tokenizer does not know have none.

        Raises:
            InvalidRequestError: no tokenizer.
        """
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A decoder for the output of one sequence that continues `prompt_token_ids`.

        Raises:
            InvalidRequestError: no tokenizer.
        """
        return Detokenizer(
            self._tokenizer,
            self._special_token_ids,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._loaded_tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: send token ids instead of text")
        return self._loaded_tokenizer

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The same tokenizer, but reading control tokens as the characters they are."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _render_marked(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
    ) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template: use completions", param="messages"
            )
        marked = [
            {key: self._control.mark(value) for key, value in message.items()}
            for message in messages
        ]
        return self._template.render(marked, add_generation_prompt=add_generation_prompt)

    def _encode_piece(self, text: str, as_characters: bool) -> list[int]:
        tokenizer = self._plain_tokenizer if as_characters else self._tokenizer
        return _encode(tokenizer, text, add_special_tokens=False)

    def _encode_continuation(self, text: str, as_characters: bool) -> list[int]:
        """Encode a piece that is not the first.

        SentencePiece's tokenizers put a space before the first word of what they are given, so
        the piece is encoded behind a newline, which is then taken away again.
        """
        newline = self._encode_piece("\n", as_characters)
        token_ids = self._encode_piece("\n" + text, as_characters)
        if token_ids[: len(newline)] == newline:
            return token_ids[len(newline) :]
        return self._encode_piece(text, as_characters)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
        raise InvalidRequestError("the text is not valid Unicode") from error


def _is_control(token: AddedToken, template: ChatTemplate | None) -> bool:
    """Special, or an added token that the template itself writes, such as `<think>`."""
    content = token.content
    written = template is not None and content in template.source and not content.isspace()
    return token.special or written


def _load_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name; the first config that names one decides."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        for config in configs:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
                break
    return tokens


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = {item["name"]: item["template"] for item in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_token_ids(
    configs: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, eos_token: str | None
) -> frozenset[int]:
    """All the ids that any config calls the end: chat models often have more than one."""
    token_ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        token_ids.update(value if isinstance(value, list) else () if value is None else (value,))
    if tokenizer is not None and eos_token is not None:
        token_id = tokenizer.token_to_id(eos_token)
        token_ids.update(() if token_id is None else (token_id,))
    return frozenset(token_ids)


def _vocab_size(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> int:
    if isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    if tokenizer is None:
        raise ModelError(f"{folder} has neither a tokenizer.json nor a vocab_size in config.json")
    return int(tokenizer.get_vocab_size())
