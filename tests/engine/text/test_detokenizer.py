"""Streaming decode: the oracle is the decoding of the whole, by bytes or by transformers."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from manylora.engine.text.detokenizer import Detokenizer
from support.tiny_model import byte_tokenizer

CORPUS = ["the cat sat on the mat", "naïve café 😀 👩‍👩‍👧 日本語 ½ – done", "  12 \n\n tabs\t 🎉🎉"]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3, Qwen, SmolLM: characters may be split over ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind, as of Llama 2: spaces as ▁, unknown characters byte by byte."""
    pieces = ["▁", "▁the", "▁cat", "c", "a", "t", "▁a", "\n", "é"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
ONE_BYTE = byte_tokenizer()
ONE_BYTE_IDS = st.integers(0, 255)  # in the order of the byte-level alphabet
VOCAB_IDS = st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)  # and a few that do not exist
TEXTS = st.one_of(st.sampled_from(CORPUS), st.text(st.sampled_from("acet é😀日 \n"), max_size=12))


def detokenizer(
    tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip: bool = True
) -> Detokenizer:
    special = frozenset(
        i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    return Detokenizer(tokenizer, special, prompt, skip_special_tokens=skip)


def pieces(decoder: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """What ids of the one-byte tokenizer stand for, by GPT-2's table of printable bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + n): byte for n, byte in enumerate(others)}
    return bytes(table[token] for token in ONE_BYTE.convert_ids_to_tokens(list(token_ids)))


@pytest.mark.parametrize("skip", [True, False])
@given(token_ids=st.lists(VOCAB_IDS, max_size=30))
def test_pieces_joined_are_the_text_of_the_whole(skip: bool, token_ids: list[int]) -> None:
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=BYTE_LEVEL, bos_token="<s>", eos_token="</s>"
    ).decode([i for i in token_ids if i < BYTE_LEVEL.get_vocab_size()], skip_special_tokens=skip)

    assert "".join(pieces(detokenizer(BYTE_LEVEL, skip=skip), token_ids)) == oracle


@given(st.lists(ONE_BYTE_IDS, max_size=12))
def test_bytes_that_are_no_text_come_out_as_python_decodes_them(token_ids: list[int]) -> None:
    joined = "".join(pieces(detokenizer(ONE_BYTE.backend_tokenizer), token_ids))

    assert joined == as_bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@given(text=TEXTS)
@example(text="😀😀é")
def test_no_piece_of_valid_text_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids

    got = pieces(detokenizer(tokenizer), token_ids)

    assert "".join(got) == text
    assert not any("\ufffd" in piece for piece in got)


@given(text=st.text(st.sampled_from("aé😀日"), max_size=8))
def test_text_is_given_out_with_the_byte_that_completes_it(text: str) -> None:
    decoder = detokenizer(ONE_BYTE.backend_tokenizer)
    shown, received = "", b""

    for token_id in ONE_BYTE.encode(text):
        shown += decoder.push(token_id)
        received += as_bytes([token_id])
        assert shown == received.decode("utf-8", errors="ignore")


@given(st.lists(ONE_BYTE_IDS, max_size=12), st.lists(ONE_BYTE_IDS, max_size=8))
@example(list("😀".encode()), [])
def test_the_output_never_repeats_the_prompt(prompt: list[int], output: list[int]) -> None:
    prompt_text = as_bytes(prompt).decode("utf-8", errors="replace")
    whole = as_bytes(prompt + output).decode("utf-8", errors="replace")
    tokenizer = ONE_BYTE.backend_tokenizer

    joined = "".join(pieces(detokenizer(tokenizer, prompt), output))

    assert joined == whole[_common_length(prompt_text, whole) :]


def _common_length(one: str, other: str) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_a_character_begun_by_the_prompt_is_completed_by_the_output() -> None:
    *prompt, last = ONE_BYTE.encode("smile 😀")
    decoder = detokenizer(ONE_BYTE.backend_tokenizer, prompt)

    assert pieces(decoder, [last, *ONE_BYTE.encode("!")]) == ["😀", "!", ""]


def test_a_token_that_ends_in_half_a_character_gives_its_text_once() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "að"])}  # "a", then byte F0
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "ð")]))
    tokenizer.decoder = decoders.ByteLevel()
    first, *rest = ONE_BYTE.encode("😀")  # F0, and the three bytes that complete it

    got = pieces(detokenizer(tokenizer, [first]), [vocabulary["að"], *rest])

    assert got == ["a", "", "", "😀", ""]


@pytest.mark.parametrize(
    ("prompt", "expected"), [("", "the cat"), ("a", " the cat")], ids=["first", "continued"]
)
def test_a_leading_space_stays_where_the_prompt_goes_on(prompt: str, expected: str) -> None:
    the_cat = [BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("▁cat")]
    prompt_ids = BYTE_FALLBACK.encode(prompt).ids

    joined = "".join(pieces(detokenizer(BYTE_FALLBACK, prompt_ids), the_cat))

    assert joined == expected


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    token_ids = [
        BYTE_LEVEL.token_to_id("<s>"),
        *BYTE_LEVEL.encode("the").ids,
        BYTE_LEVEL.token_to_id("</s>"),
    ]

    assert "".join(pieces(detokenizer(BYTE_LEVEL), token_ids)) == "the"
    assert "".join(pieces(detokenizer(BYTE_LEVEL, skip=False), token_ids)) == "<s>the</s>"


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_bytes_that_never_become_text_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    """What is held back is decoded again with each id: without an end to it, each costs more."""
    lonely = tokenizer.token_to_id("<0x80>") or tokenizer.encode("é").ids[-1]
    decoder = Detokenizer(tokenizer, frozenset(), [])

    held = [len(decoder.push(lonely)) for _ in range(1000)]

    assert sum(held) > 900
