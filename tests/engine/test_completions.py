"""Several completions of one prompt: each as it would be alone, whatever it is made beside."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import Request
from manylora.engine.completions import params_of_completions
from manylora.engine.errors import InvalidRequestError
from manylora.engine.llm import GenerationResult
from support.engine import make_llm

PROMPT = list(range(40))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with make_llm(tiny_model) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def drawn(result: GenerationResult) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in result.outputs]


def test_the_first_is_what_one_alone_would_be_and_the_others_differ(llm: LLM) -> None:
    (alone,) = llm.generate(PROMPT, SAMPLED)
    (four,) = llm.generate(PROMPT, replace(SAMPLED, n=4))

    assert len(four.outputs) == 4
    assert drawn(four)[0] == drawn(alone)[0]
    assert len(set(drawn(four))) == 4
    assert all(len(tokens) == 8 for tokens in drawn(four))
    assert [c.text for c in four.outputs] == [
        llm.core.text.decode(c.token_ids) for c in four.outputs
    ]


def test_each_is_the_same_whatever_shares_the_batch(llm: LLM, tiny_model: Path) -> None:
    (first,) = llm.generate(PROMPT, replace(SAMPLED, n=5))
    crowd = [replace(SAMPLED, n=3, seed=9), replace(SAMPLED, n=7), replace(SAMPLED, n=2)]
    crowded = llm.generate([[9, 8, 7], PROMPT, PROMPT], crowd)
    with make_llm(tiny_model, max_num_seqs=2, num_kv_blocks=9, seed=77) as small:
        (tight,) = small.generate(PROMPT, replace(SAMPLED, n=5))

    assert drawn(crowded[1])[:5] == drawn(first)
    assert drawn(crowded[2]) == drawn(first)[:2]
    assert drawn(tight) == drawn(first)


def test_greedy_completions_are_alike(llm: LLM) -> None:
    (result,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, n=3))

    assert len(set(drawn(result))) == 1


def test_without_a_seed_the_engines_own_decides_and_n_disturbs_no_other_prompt(
    tiny_model: Path,
) -> None:
    unseeded = replace(SAMPLED, seed=None)

    def draw(*counts: int) -> list[list[tuple[int, ...]]]:
        with make_llm(tiny_model, seed=3) as llm:
            results = llm.generate([PROMPT] * len(counts), [replace(unseeded, n=n) for n in counts])
        return [drawn(result) for result in results]

    ones, several = draw(1, 1, 1), draw(1, 4, 2)

    assert [result[0] for result in several] == [result[0] for result in ones]
    assert len({tokens for result in several for tokens in result}) == 7
    assert draw(1, 4, 2) == several


def test_the_prompts_numbers_are_told_once(llm: LLM) -> None:
    (result,) = llm.generate(PROMPT, replace(SAMPLED, n=3, prompt_logprobs=1, logprobs=1))

    assert [p and p.token_id for p in result.prompt_logprobs] == [None, *PROMPT[1:]]
    assert all(len(completion.logprobs) == 8 for completion in result.outputs)


def test_each_completion_ends_for_its_own_reason(llm: LLM) -> None:
    """Stop at a token that some of the draws meet early, others late or never."""
    (free,) = llm.generate(PROMPT, replace(SAMPLED, n=6))
    stop = drawn(free)[2][3]

    (result,) = llm.generate(PROMPT, replace(SAMPLED, n=6, stop_token_ids=[stop]))

    for completion, tokens in zip(result.outputs, drawn(free), strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else 8
        assert tuple(completion.token_ids) == tokens[:end]
        assert completion.finish_reason == ("stop" if stop in tokens else "length")


def test_a_prompt_refused_leaves_no_completion_behind(llm: LLM) -> None:
    before = llm.stats().num_steps

    with pytest.raises(InvalidRequestError, match="context is"):
        llm.generate([PROMPT, [1] * 600], replace(SAMPLED, n=3))

    assert llm.stats().num_steps == before
    assert llm.stats().num_waiting == 0


def test_a_queue_that_takes_only_some_of_them_takes_none(tiny_model: Path) -> None:
    with make_llm(tiny_model, max_num_waiting=2) as llm:
        with pytest.raises(Exception, match="queue is full"):
            llm.generate(PROMPT, replace(SAMPLED, n=3))
        assert llm.stats().num_waiting == 0
        assert len(llm.generate(PROMPT, replace(SAMPLED, n=2))[0].outputs) == 2


def test_a_single_request_is_one_completion() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(n=2), tenant="a")

    assert caught.value.param == "n"


@given(seed=st.integers(-(1 << 63) + 1, (1 << 63) - 1), count=st.integers(1, 128))
def test_seeds_follow_from_seed_and_index_alone(seed: int, count: int) -> None:
    params = params_of_completions(SamplingParams(n=count), seed)
    most = params_of_completions(SamplingParams(n=128, temperature=0.3), seed)

    assert [one.seed for one in params] == [one.seed for one in most[:count]]
    assert params[0] == SamplingParams(seed=seed)
    assert len({one.seed for one in most}) == 128
