"""What a line may say: everything by its name, nothing else, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from manylora.engine.api import SamplingParams
from manylora.engine.errors import InvalidRequestError
from manylora.generate.adapters import adapter_folder
from manylora.generate.input_lines import InputLine, parse_object, read_asked, read_lines

DEFAULTS = {"max_tokens": 7, "temperature": 0.5}


def read(raw: str) -> Any:
    return read_asked(parse_object(raw.encode()), DEFAULTS)


def test_a_line_says_prompt_adapter_and_params_by_name() -> None:
    asked = read(
        '{"id": 5, "prompt": "é", "adapter": "pirate", "temperature": 0, "stop": "a",'
        ' "logit_bias": {"3": -1}, "n": 2, "seed": null}'
    )

    assert (asked.id, asked.prompt, asked.adapter) == (5, "é", "pirate")
    assert asked.params == SamplingParams(
        max_tokens=7, temperature=0, stop=["a"], logit_bias={3: -1.0}, n=2
    )


def test_token_ids_and_messages_are_prompts_too() -> None:
    assert read('{"prompt_token_ids": [1, 2]}').prompt_token_ids == [1, 2]
    assert read('{"messages": [{"role": "user", "content": "hi"}]}').messages == [
        {"role": "user", "content": "hi"}
    ]


def test_every_sampling_parameter_has_its_name() -> None:
    every = SamplingParams(
        n=2,
        max_tokens=9,
        temperature=0.1,
        top_p=0.2,
        top_k=3,
        min_p=0.4,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={5: 1.0},
        min_tokens=1,
        seed=6,
        stop=["b"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=2,
    )
    fields = {name: getattr(every, name) for name in every.__slots__}
    assert all(fields[name] != getattr(SamplingParams(), name) for name in fields)

    assert read(json.dumps({"prompt": "a", **fields})).params == every


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ('{"prompt": "a", "best_of": 2}', "unknown field: best_of"),
        ('{"prompt": "a", "params": {}}', "unknown field: params"),
        ('{"prompt": "a", "max_tokens": "x"}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature must be between 0 and 2"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        ('{"prompt": "a", "stop": [1]}', r"stop\[0\]"),
        ('{"prompt": "a", "n": 0}', "n must be between 1 and 128"),
        ('{"prompt": 1}', "prompt: "),
        ('{"prompt_token_ids": [1.5]}', r"prompt_token_ids\[0\]"),
        ('{"messages": ["hi"]}', r"messages\[0\]"),
        ('{"id": [1], "prompt": "a"}', "id: "),
        ('{"id": 1}', "one of prompt, prompt_token_ids and messages"),
        ('{"prompt": "a", "messages": []}', "one of prompt, prompt_token_ids and messages"),
        ('{"prompt": "a", "prompt": "b"}', "a field twice"),
        ('{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "a field twice"),
        ('{"prompt": NaN}', "NaN"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('["prompt"]', "not a JSON object"),
        ('{"prompt": "a"', "not JSON: .* at character 14"),
        ("[" * 100_000, "nested too deep"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "too many digits"),
    ],
)
def test_what_is_wrong_is_named(raw: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read(raw)


def test_a_line_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        parse_object(b'{"prompt": "\xff"}')


def test_blank_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\n{"prompt":"\xe2\x80\xa8"}\r\n   \n\n{"prompt":"b"}')

    lines = list(read_lines(path))

    assert lines == [InputLine(1, '{"prompt":"\u2028"}'.encode()), InputLine(4, b'{"prompt":"b"}')]


def test_the_digest_is_of_line_and_options() -> None:
    digests = {
        InputLine(0, raw).digest(options) for raw in (b"a", b"b") for options in (b"x", b"y")
    }

    assert len(digests) == 4
    assert InputLine(9, b"a").digest(b"x") in digests


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", ""])
def test_what_can_be_no_folder_is_an_error_of_its_line(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        adapter_folder(name, {})

    assert caught.value.param == "adapter"
