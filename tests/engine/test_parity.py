"""Our logits are those of transformers and peft, for a tiny model in every mode of batching."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manylora.engine import SamplingParams
from manylora.engine.adapters import AdapterWeights
from support.engine import largest_error, make_llm, prompt_logits
from support.oracle import load_oracle, oracle_greedy, oracle_logits
from support.tiny_model import ADAPTER_SHAPES, make_tiny_llama

TOLERANCE = 1e-4
CHUNKS = (1, 7, 64)  # tokens in one step: prompts in single tokens, odd pieces, whole
NAMES = (None, *ADAPTER_SHAPES)


def prompts() -> list[list[int]]:
    """One of another length for the base and each adapter, some longer than a block or a tile."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (45, 3, 33, 17)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tiny_adapters: dict[str, Path]) -> list[torch.Tensor]:
    return [
        oracle_logits(load_oracle(tiny_model, name and tiny_adapters[name]), prompt)
        for name, prompt in zip(NAMES, prompts(), strict=True)
    ]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_batch_of_adapters_has_the_oracles_logits_at_every_position(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: list[torch.Tensor], chunk: int
) -> None:
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 8)}
    with make_llm(tiny_model, **options) as llm:
        adapters = [name and llm.load_adapter(tiny_adapters[name]) for name in NAMES]
        ours = prompt_logits(llm, prompts(), adapters)

    for name, logits, oracle in zip(NAMES, ours, expected, strict=True):
        assert largest_error(logits, oracle) <= TOLERANCE, name


def test_a_scale_one_percent_off_is_seen(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: list[torch.Tensor]
) -> None:
    """The tolerance above has the power to find a small error in how an adapter is applied."""
    with make_llm(tiny_model) as llm:
        adapters = [name and llm.load_adapter(tiny_adapters[name]) for name in NAMES]
        for info in adapters:
            if info is not None:
                llm.core.adapters.put(_rescaled(llm.core.adapters.get(info.digest), 1.01))
        ours = prompt_logits(llm, prompts(), adapters)

    for name, logits, oracle in zip(NAMES, ours, expected, strict=True):
        assert (largest_error(logits, oracle) > TOLERANCE) == (name is not None), name


def _rescaled(weights: AdapterWeights, factor: float) -> AdapterWeights:
    modules = {
        path: replace(matrices, scale=factor * matrices.scale)
        for path, matrices in weights.modules.items()
    }
    return replace(weights, modules=modules)


def test_greedy_decoding_gives_the_oracles_tokens(
    tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with make_llm(tiny_model) as llm:
        adapters = [name and llm.load_adapter(tiny_adapters[name]) for name in NAMES]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        results = llm.generate(prompts(), params, adapter=adapters)

    for name, prompt, result in zip(NAMES, prompts(), results, strict=True):
        oracle = load_oracle(tiny_model, name and tiny_adapters[name])
        assert result.outputs[0].token_ids == oracle_greedy(oracle, prompt, 64), name


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 24},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rms_norm_eps": 1e-3, "num_hidden_layers": 1},
    ],
    ids=["untied", "multi-head", "multi-query, own head size", "rope theta", "norm eps"],
)
def test_other_shapes_of_the_model_have_the_oracles_logits(
    tmp_path: Path, config: dict[str, object]
) -> None:
    model = make_tiny_llama(tmp_path / "model", seed=3, **config)
    prompt = prompts()[0]

    with make_llm(model, max_num_batched_tokens=16) as llm:
        (ours,) = prompt_logits(llm, [prompt], [None])

    assert largest_error(ours, oracle_logits(load_oracle(model), prompt)) <= TOLERANCE
