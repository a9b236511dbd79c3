"""Offline runs: every line answered once, as the engine answers it, and resumed without a trace."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.engine import LLM, SamplingParams
from manylora.engine.config import EngineConfig
from manylora.engine.llm import WINDOW
from manylora.engine.sampler import draw_seed
from manylora.generate import run
from manylora.generate.input_lines import InputLine
from manylora.generate.run import Summary, generate_file
from manylora.platform.settings import SettingsError
from support.engine import make_llm

SOURCE, OUTPUT = Path("in.jsonl"), Path("out.jsonl")
GREEDY = {"max_tokens": 6, "temperature": 0.0}


def write(*lines: Mapping[str, Any] | str) -> None:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    SOURCE.write_text("".join(f"{line}\n" for line in text))


def generate(config: EngineConfig, **options: Any) -> Summary:
    values: dict[str, Any] = {"defaults": GREEDY, "adapters": {}}
    return generate_file(SOURCE, OUTPUT, config, **(values | options))


def answers() -> dict[int, dict[str, Any]]:
    """The output by index; it has none twice."""
    lines = [json.loads(line) for line in OUTPUT.read_bytes().splitlines()]
    found = {line["index"]: line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


def test_each_kind_of_line_is_answered_as_the_engine_answers_it(
    config: EngineConfig, llm: LLM, adapter: Path
) -> None:
    chat = [{"role": "user", "content": "hi"}]
    write(
        {"prompt": "hello", "id": "a"},
        {"prompt_token_ids": [5, 6], "id": 2, "max_tokens": 3},
        "",
        {"messages": chat, "stop": ["a"], "include_stop_str_in_output": True},
        {"prompt": "hello", "adapter": "mine"},
        {"prompt": "hello", "adapter": str(adapter)},
    )

    summary = generate(config, adapters={"mine": adapter})

    info = llm.load_adapter(adapter)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    (one,) = llm.generate("hello", greedy)
    (two,) = llm.generate([5, 6], replace(greedy, max_tokens=3))
    (three,) = llm.chat(chat, replace(greedy, stop=["a"], include_stop_str_in_output=True))
    (four,) = llm.generate("hello", greedy, adapter=info)
    told = answers()
    assert summary == Summary(num_answers=5, num_errors=0, num_found=0)
    assert sorted(told) == [0, 1, 3, 4, 5]
    assert [told[n].get("id") for n in sorted(told)] == ["a", 2, None, None, None]
    for index, result in zip(sorted(told), [one, two, three, four, four], strict=True):
        (completion,) = result.outputs
        assert told[index]["text"] == completion.text
        assert told[index]["finish_reason"] == completion.finish_reason
        assert told[index]["prompt_tokens"] == len(result.prompt_token_ids)
        assert told[index]["completion_tokens"] == len(completion.token_ids)
    assert told[1]["token_ids"] == two.outputs[0].token_ids
    assert told[4]["adapter_digest"] == told[5]["adapter_digest"] == info.digest
    assert told[4]["text"] != told[0]["text"]


def test_log_probabilities_and_several_completions_are_written_where_asked(
    config: EngineConfig, llm: LLM
) -> None:
    params = {"n": 3, "seed": 4, "temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1}
    write({"prompt_token_ids": [5, 6], **params})

    generate(config)

    (result,) = llm.generate([5, 6], SamplingParams(max_tokens=6, **params))  # type: ignore[arg-type]
    told = answers()[0]
    assert [o["token_ids"] for o in told["outputs"]] == [c.token_ids for c in result.outputs]
    assert told["completion_tokens"] == sum(len(c.token_ids) for c in result.outputs)
    first, expected = told["outputs"][0]["logprobs"][0], result.outputs[0].logprobs[0]
    assert (first["token_id"], first["logprob"]) == (expected.token_id, expected.logprob)
    assert [tuple(pair) for pair in first["top"]] == list(expected.top)
    assert [p and p["token_id"] for p in told["prompt_logprobs"]] == [None, 6]


def test_a_bad_line_is_an_error_by_its_id_and_the_others_go_on(
    config: EngineConfig, folder: Path
) -> None:
    (folder / "empty").mkdir()
    bad = [
        {"prompt": "a", "max_tokens": 0},
        {"id": "x", "prompt": "a", "nosuch": 1},
        {"id": 10**30, "prompt_token_ids": [999]},
        {"id": True, "prompt": "a"},
        {"prompt": "a", "adapter": "nobody"},
        {"prompt": "a", "adapter": "empty"},
        {"prompt": "a", "adapter": "empty"},
        {"prompt_token_ids": [1] * 600},
        "rubbish",
    ]
    write({"prompt": "first"}, *bad, {"prompt": "last"})

    summary = generate(config)

    told = answers()
    assert summary == Summary(num_answers=2, num_errors=9, num_found=0)
    assert sorted(told) == list(range(11))
    assert "text" in told[0]
    assert "text" in told[10]
    said = [told[n]["error"] for n in range(1, 10)]
    for part, error in zip(
        ["max_tokens", "nosuch", "token id", "id: ", "nobody", *["adapter_config"] * 2],
        said[:7],
        strict=True,
    ):
        assert part in error
    assert "context" in said[7]
    assert "JSON" in said[8]
    assert [told[n].get("id") for n in range(1, 5)] == [None, "x", 10**30, None]


def test_lines_of_one_id_are_all_answered(config: EngineConfig) -> None:
    write({"id": "x", "prompt": "a"}, "", {"id": "x", "prompt": "b"})

    assert generate(config) == Summary(num_answers=2, num_errors=0, num_found=0)
    assert {index: line["id"] for index, line in answers().items()} == {0: "x", 2: "x"}


def test_an_adapter_is_read_once_however_many_lines_name_it(
    config: EngineConfig, folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "empty").mkdir()
    write(*({"prompt": "a", "adapter": name} for name in ["empty", str(adapter)] * 3))
    read: list[Path] = []
    load = LLM.load_adapter
    monkeypatch.setattr(
        LLM, "load_adapter", lambda llm, path: [read.append(path), load(llm, path)][1]
    )

    generate(config)

    assert read == [Path("empty"), adapter]
    assert [("error" in answers()[n]) for n in range(6)] == [True, False] * 3


def test_a_run_cut_off_anywhere_ends_as_if_it_never_was(config: EngineConfig) -> None:
    """Sampled lines too: each draws from its own place, whatever was done before."""
    write(*({"prompt": f"p{n}", "temperature": n % 2, "max_tokens": 1 + n % 7} for n in range(24)))
    generate(config)
    whole, expected = OUTPUT.read_bytes(), answers()
    draw = random.Random(0)

    for cut in [0, 1, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(9))]:
        OUTPUT.write_bytes(whole[:cut])
        summary = generate(config)
        assert answers() == expected
        assert summary == Summary(24, 0, whole[:cut].count(b"\n"))


def test_a_line_without_a_seed_draws_from_the_engines_and_its_place(
    config: EngineConfig, llm: LLM
) -> None:
    write(*({"prompt": "same", "temperature": 1.0} for _ in range(3)))
    generate(replace(config, seed=8))

    params = SamplingParams(temperature=1.0, max_tokens=6)
    seeds = [draw_seed(8, index + 1) for index in range(3)]
    expected = llm.generate(["same"] * 3, [replace(params, seed=seed) for seed in seeds])
    told = answers()
    assert [told[n]["text"] for n in range(3)] == [r.outputs[0].text for r in expected]
    assert len({told[n]["text"] for n in range(3)}) == 3


def test_nothing_is_left_to_do_without_an_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"prompt": "a"}, {"prompt": "a", "n": 0})
    first = generate(config)
    before = OUTPUT.read_bytes()
    monkeypatch.setattr(run, "LLM", None)

    again = generate(config)

    assert again == Summary(num_answers=1, num_errors=1, num_found=2)
    assert first == replace(again, num_found=0)
    assert OUTPUT.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [{"defaults": GREEDY | {"temperature": 0.5}}, {"config": {"seed": 1}}],
    ids=str,
)
def test_a_run_does_not_go_on_with_other_options(
    config: EngineConfig, other: dict[str, Any]
) -> None:
    write({"prompt": "a"}, {"prompt": "b"})
    generate(config)
    before = OUTPUT.read_bytes()
    config = replace(config, **other.pop("config", {}))

    with pytest.raises(SettingsError, match="another model or other options"):
        generate(config, **other)

    assert OUTPUT.read_bytes() == before


def test_no_more_lines_are_read_than_keep_the_engine_busy(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(*({"prompt": "a", "max_tokens": 3, "n": 1 + n % 3} for n in range(90)))
    ahead = []
    read_lines, append = run.read_lines, run.ResultsFile.append
    num_written = 0

    def counting_lines(path: Path) -> Iterator[InputLine]:
        for number, line in enumerate(read_lines(path), start=1):
            ahead.append(number - num_written)
            yield line

    def counting_append(self: Any, line: Mapping[str, Any]) -> None:
        nonlocal num_written
        num_written += 1
        append(self, line)

    monkeypatch.setattr(run, "read_lines", counting_lines)
    monkeypatch.setattr(run.ResultsFile, "append", counting_append)

    generate(config)

    assert len(answers()) == 90
    assert config.max_num_seqs < max(ahead) <= WINDOW * config.max_num_seqs + 1


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"adapters": {"mine": Path("nowhere")}}, {}, "lora_modules: mine"),
        ({"defaults": GREEDY | {"top_p": 2.0}}, {}, "top_p must be between"),
        ({}, {"device": "cuda:99"}, "device"),
        ({}, {"max_model_len": 513}, "max_model_len is 513"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told_before_anything_is_generated(
    config: EngineConfig, options: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    write({"prompt": "a"})

    with pytest.raises(SettingsError, match=said):
        generate(replace(config, **changes), **options)

    assert not OUTPUT.exists() or OUTPUT.read_bytes() == b""


def test_a_missing_input_is_named_and_the_input_is_not_written_over(config: EngineConfig) -> None:
    with pytest.raises(SettingsError, match=r"INPUT: there is no file in\.jsonl"):
        generate(config)
    write({"prompt": "a"})
    OUTPUT.symlink_to(SOURCE)

    with pytest.raises(SettingsError, match="it is the input"):
        generate(config)

    assert SOURCE.read_text() == '{"prompt": "a"}\n'
