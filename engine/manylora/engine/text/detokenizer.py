"""Token ids to text, one at a time, never half a character.

A window of the latest token ids is decoded with each new one and compared with what was already
given out of it. The window starts with the ids behind the previous piece of text: decoders such
as SentencePiece's drop a leading space, so an id must never be decoded as if it were the first.
The idea of the two offsets is that of text-generation-inference's and vLLM's detokenisers.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_OPEN_CHARACTERS = 64
# Enough to hold any unfinished character at the prompt's end and the id before it.
PROMPT_CONTEXT_TOKENS = 8


class Detokenizer:
    """Incremental decoding of one sequence's output, as the continuation of its prompt.

    What `push` returned, joined, and `flush` at the end are together the text of all output ids.
    A character begun by the prompt's last token and completed by the output belongs to the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_token_ids: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids if skip_special_tokens else frozenset()
        context = prompt_token_ids[-PROMPT_CONTEXT_TOKENS:]
        self._window = [token_id for token_id in context if self._has_text(token_id)]
        self._text = self._decode(self._window)  # the window's text
        self._num_given = len(self._text)  # its characters that are given out, or the prompt's
        self._open_prompt = self._text if _open_length(self._text) else ""
        self._num_context = 0  # ids of the window to drop when its text next ends cleanly

    def push(self, token_id: int) -> str:
        """Add one output id; returns the text that is now certain, often but not always some."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if self._open_prompt:  # of which the output may just have completed the last character
            self._num_given = _common_length(self._open_prompt, self._text)
        open_length = _open_length(self._text)
        new_text = self._text[self._num_given : len(self._text) - open_length]
        self._num_given += len(new_text)
        if new_text or not open_length:
            self._open_prompt = ""
        if not open_length:
            self._slide()
        return new_text

    def flush(self) -> str:
        """What was held back, at the end: replacement characters for bytes that make no text."""
        rest = self._text[self._num_given :]
        self._num_given += len(rest)
        return rest

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _slide(self) -> None:
        """Keep only the ids behind the newest text, as context for the next."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._text = self._decode(self._window)
        self._num_given = len(self._text)


def _open_length(text: str) -> int:
    """How many characters at the end of `text` may still turn into another one.

    Byte-level decoders show an unfinished character as one replacement character, byte-fallback
    decoders show all the bytes of a run, finished characters too, as one each. A run longer than
    any real one is bytes that make no text: it is let go, or decoding it would cost ever more.
    """
    length = len(text) - len(text.rstrip(REPLACEMENT))
    return length if length <= MAX_OPEN_CHARACTERS else 0


def _common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
