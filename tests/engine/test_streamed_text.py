"""Streamed text joined is the whole text: of any tokens, after any prompt, cut at stop strings.

The oracle decodes all ids at once and searches the whole text, one character more at a time.
"""

from collections.abc import Sequence as Tokens
from functools import reduce
from itertools import chain, pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from manylora.engine.api import FinishReason, RequestOutput
from manylora.engine.text.processor import TextProcessor
from support.outputs import feed

CORPUS = [
    "the cat sat on the mat 😀😀",
    "naïve café 👩‍👩‍👧 日本語 ½ – done",
    "STOP\n\nSTOP tabs\t 🎉🎉",
]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Every byte alone, merged pieces of words and of characters, and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZER = byte_level()
TEXT = TextProcessor(vocab_size=TOKENIZER.get_vocab_size(), tokenizer=TOKENIZER)
ANY_ID = st.integers(0, TOKENIZER.get_vocab_size() - 1)
# Ids of text as the tokenizer cuts it, ids of its bytes, and ids that make no text.
PIECES = st.one_of(
    st.sampled_from([*CORPUS, "STOP", "😀", "é日"]).map(lambda text: TOKENIZER.encode(text).ids),
    st.text("STOPaé😀日 ", max_size=4).map(lambda text: TOKENIZER.encode(text).ids),
    st.lists(ANY_ID, max_size=6),
)
IDS = st.lists(PIECES, min_size=1, max_size=4).map(lambda parts: [*chain(*parts)][:60])


def decoded(token_ids: Tokens[int], *, skip: bool) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=skip)


def text_after(prompt: Tokens[int], output: Tokens[int], *, skip: bool) -> str:
    """The text of all that the prompt's own does not begin with."""
    before, together = decoded(prompt, skip=skip), decoded([*prompt, *output], skip=skip)
    pairs = zip(before, together, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(together)))
    return together[common:]


def cut(text: str, stops: Tokens[str], *, include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is completed first, the longest of those."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[int], list[str]]:
    """A prompt, an output, and stop strings that are mostly parts of its text."""
    prompt, output = draw(IDS.filter(len)), draw(IDS.filter(len))
    text = text_after(prompt, output, skip=True)
    starts = st.integers(0, max(0, len(text) - 1))
    part = st.tuples(starts, st.integers(1, 6)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stop = st.one_of(part, st.text("STOP😀\ufffd", min_size=1, max_size=4)).filter(len)
    return prompt, output, draw(st.lists(stop, max_size=3))


@given(answer=answers(), include=st.booleans(), skip=st.booleans())
def test_streamed_text_joined_is_the_whole_text_up_to_the_first_stop_string(
    answer: tuple[list[int], list[int], list[str]], include: bool, skip: bool
) -> None:
    prompt, output, stops = answer

    outputs = feed(
        TEXT,
        output,
        prompt=prompt,
        max_tokens=len(output),
        stop=stops,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )

    expected, stop = cut(text_after(prompt, output, skip=skip), stops, include=include)
    assert "".join(one.text for one in outputs) == expected
    assert outputs[-1].stop_reason == stop
    reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
    assert outputs[-1].finish_reason is reason


@given(answer=answers(), include=st.booleans(), data=st.data())
def test_a_reader_that_was_slow_for_a_while_gets_the_same(
    answer: tuple[list[int], list[int], list[str]], include: bool, data: st.DataObject
) -> None:
    prompt, output, stops = answer
    options = {"stop": stops, "include_stop_str_in_output": include, "max_tokens": len(output)}
    outputs = feed(TEXT, output, prompt=prompt, **options)
    joins = data.draw(st.lists(st.booleans(), min_size=len(outputs), max_size=len(outputs)))

    read: list[RequestOutput] = []
    for one, join in zip(outputs, joins, strict=True):
        if join and read:
            read[-1] = read[-1].merged_with(one)
        else:
            read.append(one)

    assert reduce(RequestOutput.merged_with, read) == reduce(RequestOutput.merged_with, outputs)
    assert read[-1].finish_reason == outputs[-1].finish_reason


@given(
    text=st.text("STOPaé😀日 ", min_size=1, max_size=12),
    ends=st.sets(st.integers(1, 30), max_size=5),
    stops=st.lists(st.text("STOPé😀", min_size=1, max_size=4), max_size=2),
    include=st.booleans(),
)
@example(text="a😀STOP", ends={2, 4}, stops=["😀ST", "STOP"], include=True)
def test_no_piece_of_valid_text_has_half_a_character_wherever_tokens_and_stops_end(
    text: str, ends: set[int], stops: list[str], include: bool
) -> None:
    output = ids_of_parts(text.encode(), ends)
    options = {"stop": stops, "include_stop_str_in_output": include, "max_tokens": len(output)}

    outputs = feed(TEXT, output, **options)

    assert decoded(output, skip=True) == text
    assert not any("\ufffd" in one.text for one in outputs)
    assert "".join(one.text for one in outputs) == cut(text, stops, include=include)[0]


def ids_of_parts(raw: bytes, ends: set[int]) -> list[int]:
    """Each part of these bytes in its own tokens: words where it is text, single bytes else."""
    found: list[int] = []
    for start, end in pairwise(sorted({0, len(raw), *(end for end in ends if end < len(raw))})):
        part = raw[start:end]
        try:
            found += TOKENIZER.encode(part.decode()).ids
        except UnicodeDecodeError:
            found += [BYTE_IDS[byte] for byte in part]
    return found


def byte_ids() -> list[int]:
    """The id of each byte, by GPT-2's table of printable bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [TOKENIZER.token_to_id(table[byte]) for byte in range(256)]


BYTE_IDS = byte_ids()
