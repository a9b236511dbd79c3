"""The demo model and every demo adapter, in one batch, against transformers and peft."""

from pathlib import Path

import pytest
import torch

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import AdapterInfo
from support.engine import largest_error, make_llm, prompt_logits, relative_l2
from support.oracle import load_oracle, oracle_greedy, oracle_logits
from support.real_model import demo_model_folder

pytestmark = pytest.mark.real_model

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
NAMES = (None, "json", "pirate", "support")
QUESTION = "My printer shows error 52 and prints nothing. What can I do?"
GREEDY_TOKENS = 64


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model_folder()


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    with make_llm(model) as llm:
        return llm.core.text.encode_chat([{"role": "user", "content": QUESTION}])


@pytest.fixture(scope="module")
def answers(model: Path, prompt: list[int]) -> dict[str | None, list[int]]:
    """What transformers and peft answer, greedily in float32."""
    return {
        name: oracle_greedy(
            load_oracle(model, name and ADAPTERS / name, dtype=torch.float32),
            prompt,
            GREEDY_TOKENS,
        )
        for name in NAMES
    }


@pytest.fixture(scope="module")
def oracle(
    model: Path, prompt: list[int], answers: dict[str | None, list[int]]
) -> dict[str | None, torch.Tensor]:
    """Float64 logits at every position of the prompt and that answer."""
    return {
        name: oracle_logits(load_oracle(model, name and ADAPTERS / name), prompt + answers[name])
        for name in NAMES
    }


def load_all(llm: LLM) -> list[AdapterInfo | None]:
    return [name and llm.load_adapter(ADAPTERS / name) for name in NAMES]


def forced_logits(
    model: Path, prompt: list[int], answers: dict[str | None, list[int]], dtype: str
) -> dict[str | None, torch.Tensor]:
    """Our logits on the oracle's tokens, the base and all adapters in one batch."""
    with make_llm(model, dtype=dtype) as llm:
        texts = [prompt + answers[name] for name in NAMES]
        return dict(zip(NAMES, prompt_logits(llm, texts, load_all(llm)), strict=True))


def test_float32_logits_are_the_oracles_at_every_position(
    model: Path,
    prompt: list[int],
    answers: dict[str | None, list[int]],
    oracle: dict[str | None, torch.Tensor],
) -> None:
    ours = forced_logits(model, prompt, answers, "float32")

    for name in NAMES:
        assert largest_error(ours[name], oracle[name]) <= 1e-4, name


def test_greedy_float32_decoding_is_token_for_token_the_oracles(
    model: Path, prompt: list[int], answers: dict[str | None, list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)

    with make_llm(model) as llm:
        results = llm.generate([prompt] * len(NAMES), params, adapter=load_all(llm))

    for name, result in zip(NAMES, results, strict=True):
        assert result.outputs[0].token_ids == answers[name], name
    assert len({tuple(answers[name]) for name in NAMES}) == len(NAMES)


def test_bfloat16_is_as_near_to_float64_as_transformers_own_bfloat16(
    model: Path,
    prompt: list[int],
    answers: dict[str | None, list[int]],
    oracle: dict[str | None, torch.Tensor],
) -> None:
    ours = forced_logits(model, prompt, answers, "bfloat16")

    for name in NAMES:
        theirs = load_oracle(model, name and ADAPTERS / name, dtype=torch.bfloat16)
        allowed = 1.5 * relative_l2(oracle_logits(theirs, prompt + answers[name]), oracle[name])
        assert relative_l2(ours[name], oracle[name]) <= allowed, name
