"""The offline front door: one call, many prompts, and nothing left behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import FinishReason
from manylora.engine.config import EngineConfig
from manylora.engine.errors import AdapterError, InvalidRequestError, ModelError
from manylora.engine.llm import WINDOW
from support.engine import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with make_llm(tiny_model, max_num_seqs=3) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert all(slot.holds == 0 for slot in stats.slots)


def tokens(llm: LLM, prompts: Any, *args: Any, **options: Any) -> list[list[int]]:
    return [r.outputs[0].token_ids for r in llm.generate(prompts, *args, **options)]


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i, i + 1] for i in range(7)]
    params = [SamplingParams(temperature=0, max_tokens=7 - i, ignore_eos=True) for i in range(7)]

    results = llm.generate(prompts, params)

    assert [r.prompt_token_ids for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == [7, 6, 5, 4, 3, 2, 1]
    assert all(r.outputs[0].finish_reason is FinishReason.LENGTH for r in results)
    assert [tokens(llm, prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)] == [
        r.outputs[0].token_ids for r in results
    ]


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.core.text.encode("hello")

    from_text, from_ids, alone = (
        llm.generate("hello", GREEDY),
        llm.generate(ids, GREEDY),
        llm.generate([ids, "hello"], GREEDY),
    )

    assert from_text[0].prompt_token_ids == ids
    answers = [r.outputs[0] for r in (*from_text, *from_ids, *alone)]
    assert all(a.token_ids == answers[0].token_ids for a in answers)
    assert llm.core.text.decode(answers[0].token_ids) == answers[0].text


def test_prompts_may_be_written_as_vllm_has_them(llm: LLM) -> None:
    ids = llm.core.text.encode("hello")

    (one,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    many = llm.generate([{"prompt": "hello"}, {"prompt_token_ids": tuple(ids)}, ids], GREEDY)

    assert one.prompt_token_ids == ids
    assert [r.prompt_token_ids for r in many] == [ids] * 3
    assert [r.outputs[0].token_ids for r in many] == [one.outputs[0].token_ids] * 3


def test_an_adapter_by_name_is_told_what_it_should_be(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="must be what load_adapter returned"):
        # What the types forbid, and people without a type checker write.
        llm.generate([[1], [2]], GREEDY, adapter="pirate")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be what load_adapter returned"):
        llm.submit([1], GREEDY, "pirate")  # type: ignore[arg-type]


def test_the_queue_stays_short_however_many_prompts_there_are(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler looks at all that waits in each step."""
    queued = []
    step = llm.core.step
    monkeypatch.setattr(
        llm.core, "step", lambda: [queued.append(len(llm.core.sequences)), step()][1]
    )

    results = llm.generate([[i % 256] for i in range(100)], GREEDY)

    assert [r.prompt_token_ids for r in results] == [[i % 256] for i in range(100)]
    assert all(r.finished for r in results)
    assert max(queued) == WINDOW * 3


def test_a_refused_prompt_draws_no_seed(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    with make_llm(tiny_model, seed=1) as one, make_llm(tiny_model, seed=1) as other:
        for refused in ([[1], [999]], [[1] * 600]):
            with pytest.raises(InvalidRequestError):
                one.generate(refused, params)
        assert tokens(one, [1, 2], params) == tokens(other, [1, 2], params)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_one_adapter_serves_all_prompts_or_each_has_its_own(
    llm: LLM, tiny_adapters: dict[str, Path]
) -> None:
    one, other = (llm.load_adapter(tiny_adapters[name]) for name in ("all", "mlp"))
    prompt = [1, 2, 3]
    base, first, second = (tokens(llm, prompt, GREEDY, adapter=a)[0] for a in (None, one, other))

    assert tokens(llm, [prompt] * 2, GREEDY, adapter=one) == [first, first]
    assert tokens(llm, [prompt] * 3, GREEDY, adapter=[other, None, one]) == [second, base, first]
    assert len({tuple(t) for t in (base, first, second)}) == 3


def test_more_adapters_than_slots_take_turns(
    tiny_model: Path, tiny_adapters: dict[str, Path], llm: LLM
) -> None:
    with make_llm(tiny_model, max_loras=1, max_cpu_loras=1) as small:
        for engine in (small, llm):
            adapters = [engine.load_adapter(folder) for folder in tiny_adapters.values()]
        prompts = [[1, 2, 3]] * 3

        assert tokens(small, prompts, GREEDY, adapter=adapters) == tokens(
            llm, prompts, GREEDY, adapter=adapters
        )


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    (one,) = llm.chat(chat, GREEDY)
    many = llm.chat([chat, chat], GREEDY)

    assert one.prompt_token_ids == llm.core.text.encode(text)
    assert [r.outputs[0].text for r in many] == [one.outputs[0].text] * 2


def test_logprobs_come_for_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)

    (result,) = llm.generate([1, 2], params)

    completion = result.outputs[0]
    assert [p.token_id for p in completion.logprobs] == completion.token_ids
    assert all(p.top[0] == (p.token_id, p.logprob) and len(p.top) == 3 for p in completion.logprobs)


def test_an_unloaded_adapter_leaves_its_slot_and_host_memory(
    llm: LLM, tiny_adapters: dict[str, Path]
) -> None:
    info = llm.load_adapter(tiny_adapters["attention"])
    tokens(llm, [1], GREEDY, adapter=info)

    llm.unload_adapter(info)

    stats = llm.stats()
    assert info.digest not in stats.host_digests
    assert all(slot.digest != info.digest for slot in stats.slots)


@pytest.mark.parametrize(
    ("prompts", "options", "param"),
    [
        ([[1], [2]], {"params": [GREEDY]}, "params"),
        ([[1], [2]], {"adapter": [None]}, "adapter"),
        ([[1], []], {}, "prompt"),
        ("", {}, "prompt"),
        ([[1], [260]], {}, "prompt"),
        ([[1], [-1]], {}, "prompt"),
        ([[1], [1] * 512], {}, "prompt"),
        ([[1], "\ud800"], {}, None),
        ([1, [2]], {}, "prompts"),
        (["hello", 1], {}, "prompts"),
        (None, {}, "prompt"),
        (b"hello", {}, "prompt"),
        ([[1], b"hello"], {}, "prompt"),
        ([[1], [2.0]], {}, "prompt"),
        ([[1], [True]], {}, "prompt"),
        ([True], {}, "prompt"),
        ([[1], ["hello"]], {}, "prompt"),
        ({}, {}, "prompt"),
        ({"text": "hello"}, {}, "prompt"),
        ([[1], {"prompt": [1]}], {}, "prompt"),
        ({"prompt_token_ids": "hello"}, {}, "prompt"),
        ({"prompt": "hello", "prompt_token_ids": [1]}, {}, "prompt"),
        ([[1], {"prompt_token_ids": [1], "multi_modal_data": 1}], {}, "prompt"),
        ([1], {"adapter": "pirate"}, "adapter"),
        ([1], {"adapter": Path("pirate")}, "adapter"),
        ([[1], [2]], {"adapter": [None, "pirate"]}, "adapter"),
        ([1], {"params": {"n": 1}}, "params"),
        ([[1], [2]], {"params": [GREEDY, None]}, "params"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_generated(
    llm: LLM, prompts: Any, options: dict[str, Any], param: str | None
) -> None:
    before = llm.stats().num_steps

    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, **options)

    assert caught.value.param == param
    assert llm.stats().num_steps == before


def test_the_context_is_no_longer_than_the_kv_cache(tiny_model: Path) -> None:
    with make_llm(tiny_model, num_kv_blocks=2) as small:
        assert small.core.info.max_model_len == 32
        with pytest.raises(InvalidRequestError, match="context is 32 tokens") as caught:
            small.generate(list(range(32)))
        assert caught.value.code == "context_length_exceeded"
        assert len(tokens(small, [1, 2], SamplingParams(max_tokens=99, ignore_eos=True))[0]) == 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 513}, "max_model_len is 513 tokens; the model has 512"),
        ({"max_model_len": 33, "num_kv_blocks": 2}, "33 tokens; the KV cache holds 32"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_had_is_refused_with_both_numbers(
    tiny_model: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        make_llm(tiny_model, **options)

    assert caught.value.param in options


def test_requests_without_a_seed_differ_and_an_engines_seed_repeats_them(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def draws(seed: int) -> list[tuple[int, ...]]:
        with make_llm(tiny_model, seed=seed) as llm:
            batch = llm.generate([[1, 2, 3]] * 4, params) + llm.generate([1, 2, 3], params)
        return [tuple(result.outputs[0].token_ids) for result in batch]

    first = draws(1)

    assert len(set(first)) == 5
    assert draws(1) == first
    assert set(draws(2)).isdisjoint(first)


def test_an_adapter_evicted_from_host_memory_comes_back(
    tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with make_llm(tiny_model, max_cpu_loras=1, max_loras=1) as llm:
        infos = [llm.load_adapter(folder) for folder in tiny_adapters.values()]
        apart = [tokens(llm, [1, 2], GREEDY, adapter=info)[0] for info in infos]
        together = llm.generate([[1, 2]] * 3, GREEDY, adapter=infos)

        assert len(llm.stats().host_digests) <= 1
    assert [result.outputs[0].token_ids for result in together] == apart
    assert len({tuple(one) for one in apart}) == 3


def test_numbers_that_went_wrong_once_are_not_found_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of a step that gave NaN must not wait in the prefix cache for the next request."""
    prompt = list(range(60))
    run = llm.core.runner.run

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "run", lambda batch: run(batch) * float("nan"))
        failed = llm.generate(prompt, GREEDY)[0]
    again = llm.generate(prompt, GREEDY)[0]

    assert failed.outputs[0].finish_reason == "error"
    assert again.num_cached_tokens == 0
    assert again.outputs[0].finish_reason == "length"


def test_more_prompts_than_a_servers_queue_are_all_served(llm: LLM) -> None:
    """That limit protects a server; here the caller waits anyway."""
    prompts = [[i % 256] for i in range(EngineConfig().max_num_waiting + 10)]

    results = llm.generate(prompts, SamplingParams(max_tokens=1))

    assert len(results) == len(prompts)


def test_an_adapter_of_the_rejected_kind_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        llm.load_adapter(tmp_path)
    with pytest.raises(AdapterError, match=r"there is no folder .*nowhere"):
        llm.load_adapter(tmp_path / "nowhere")


def test_an_adapter_that_was_unloaded_is_named(llm: LLM, tiny_adapters: dict[str, Path]) -> None:
    info = llm.load_adapter(tiny_adapters["attention"])
    llm.unload_adapter(info)

    with pytest.raises(Exception, match=info.digest):
        llm.generate([1], GREEDY, adapter=info)


def test_a_step_that_fails_leaves_no_sequence_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2], [3]], GREEDY)

    assert len(tokens(llm, [1, 2], GREEDY)[0]) == 6


def test_logits_that_are_not_finite_end_their_own_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = llm.core.runner.run

    def poisoned(batch: Any) -> Any:
        logits = run(batch).clone()
        sampling = [entry.sequence for entry in batch.entries if entry.samples]
        for row, sequence in enumerate(sampling):
            if sequence.token_ids[0] == 66:
                logits[row, 3] = float("nan")
        return logits

    monkeypatch.setattr(llm.core.runner, "run", poisoned)
    bad, good = llm.generate([[66], [67]], GREEDY)

    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "not finite" in (bad.outputs[0].error or "")
    assert good.outputs[0].finish_reason is FinishReason.LENGTH


def test_options_are_those_of_the_engine_by_name(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LLM(tiny_model, block_size=0)
    assert caught.value.param == "block_size"


def test_an_option_that_is_none_is_named_with_the_nearest(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"max_num_seq .*did you mean max_num_seqs\?"):
        LLM(tiny_model, max_num_seq=1)
    with pytest.raises(InvalidRequestError, match=r"xyz is no option of the engine$") as caught:
        LLM(tiny_model, xyz=1)
    assert caught.value.param == "xyz"


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        LLM(tmp_path)
