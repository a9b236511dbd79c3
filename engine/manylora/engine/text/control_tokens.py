"""Keeps control tokens that clients write in messages from acting as control tokens.

A message may contain `<|im_end|>` as text. Inside a rendered chat the tokenizer would turn it
into the real token and let a client end its turn or write a system message. So each such piece is
put between two marks before the template sees it, and encoded as plain text afterwards. The method
is that of transformers' `apply_chat_template(sanitize_control_tokens=True)`.
"""

import re
from collections.abc import Iterable

# Unicode noncharacters: never part of text for interchange.
_START, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_START}{_END}]")


class ControlTokens:
    """The control tokens of one model: how to mark them in messages and find them again."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        one = "|".join(re.escape(token) for token in longest_first) or "(?!)"  # never matches
        self._token = re.compile(one)
        self._marked = re.compile(f"{_START}({one}){_END}|{_MARKS.pattern}")

    def mark(self, value: object) -> object:
        """A copy of JSON data with each control token in its strings put between marks.

        Marks that a client sent are dropped: they could disarm a token that the template writes.
        """
        if isinstance(value, str):
            return self._token.sub(f"{_START}\\g<0>{_END}", _MARKS.sub("", value))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Cut marked text at its marks: (piece, whether it is a client's control token)."""
        pieces = self._marked.split(text)  # text, token or None, text, token or None, ..., text
        return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


def without_marks(text: str) -> str:
    return _MARKS.sub("", text)
