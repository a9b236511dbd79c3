"""Every supported family has transformers' logits, in every mode of batching."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manylora.engine import SamplingParams
from manylora.engine.errors import AdapterError
from manylora.engine.models.architecture import Architecture, Layer
from manylora.engine.models.families import FAMILIES
from support.engine import largest_error, make_llm, prompt_logits
from support.oracle import load_oracle, oracle_greedy, oracle_logits
from support.tiny_families import TINY_FAMILIES, WINDOW, make_tiny_family
from support.tiny_model import make_adapter

TOLERANCE = 1e-4
CHUNKS = (1, 7, 256)  # tokens in one step: single tokens, odd pieces, whole prompts


def prompts() -> list[list[int]]:
    """One longer than a chunk of keys and a window, one shorter than anything, one between."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (160, 3, 33)]


@dataclass(frozen=True)
class TinyFamily:
    name: str
    folder: Path
    logits: list[Tensor]  # the oracle's, for each of `prompts`


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return tiny_family(tmp_path_factory.mktemp("family"), request.param)


def tiny_family(folder: Path, name: str) -> TinyFamily:
    make_tiny_family(folder, name)
    oracle = load_oracle(folder)
    return TinyFamily(name, folder, [oracle_logits(oracle, prompt) for prompt in prompts()])


def errors(family: TinyFamily, chunk: int = 256) -> list[float]:
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 8)}
    with make_llm(family.folder, **options) as llm:
        ours = prompt_logits(llm, prompts(), [None] * len(prompts()))
    return [largest_error(a, b) for a, b in zip(ours, family.logits, strict=True)]


def test_every_supported_model_type_is_tried_here() -> None:
    assert set(TINY_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_batch_has_the_oracles_logits_at_every_position(family: TinyFamily, chunk: int) -> None:
    assert max(errors(family, chunk)) <= TOLERANCE


def test_greedy_decoding_gives_the_oracles_tokens(family: TinyFamily) -> None:
    with make_llm(family.folder) as llm:
        params = SamplingParams(temperature=0, max_tokens=WINDOW + 8, ignore_eos=True)
        results = llm.generate(prompts(), params)

    oracle = load_oracle(family.folder)
    for prompt, result in zip(prompts(), results, strict=True):
        assert result.outputs[0].token_ids == oracle_greedy(oracle, prompt, WINDOW + 8)


@pytest.mark.parametrize("name", ["phi3", "gemma3_text", "qwen2", "olmo2"])
def test_an_adapter_of_every_linear_layer_beside_the_base_matches_peft(
    tmp_path: Path, name: str
) -> None:
    model = make_tiny_family(tmp_path / "model", name)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules="all-linear")

    with make_llm(model, max_num_batched_tokens=96) as llm:
        info = llm.load_adapter(adapter)
        adapters = [info, None, None, info]
        ours = prompt_logits(llm, [*prompts(), prompts()[2]], adapters)

    base, adapted = load_oracle(model), load_oracle(model, adapter)
    for prompt, used, logits in zip([*prompts(), prompts()[2]], adapters, ours, strict=True):
        expected = oracle_logits(base if used is None else adapted, prompt)
        assert largest_error(logits, expected) <= TOLERANCE
    assert largest_error(ours[2], ours[3].double()) > 0.01  # the adapter does something


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_an_adapter_of_the_attention_beside_a_mixture_matches_peft(
    tmp_path: Path, name: str
) -> None:
    model = make_tiny_family(tmp_path / "model", name)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])

    with make_llm(model) as llm:
        info = llm.load_adapter(adapter)
        ours = prompt_logits(llm, [prompts()[2]] * 2, [info, None])

    for folder, logits in zip((adapter, None), ours, strict=True):
        expected = oracle_logits(load_oracle(model, folder), prompts()[2])
        assert largest_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("form", ["fused parameters", "a module an expert"])
def test_an_adapter_of_the_experts_is_refused_by_name(tmp_path: Path, form: str) -> None:
    model, folder = make_tiny_family(tmp_path / "model", "qwen3_moe"), tmp_path / "adapter"
    if form == "fused parameters":
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        make_adapter(model, folder, target_modules=[], target_parameters=parameters)
        said = "target_parameters"
    else:
        make_adapter(model, folder)
        weights = load_file(folder / "adapter_model.safetensors")
        renamed = {
            name.replace("layers.0.self_attn.q_proj", "layers.0.mlp.experts.3.up_proj"): weight
            for name, weight in weights.items()
        }
        save_file(renamed, folder / "adapter_model.safetensors")
        said = r"experts\.3\.up_proj.*adapters of experts are not supported"

    with make_llm(model) as llm, pytest.raises(AdapterError, match=said):
        llm.load_adapter(folder)


Change = Callable[[Architecture], Architecture]


def fact(**values: Any) -> Change:
    return lambda facts: replace(facts, **values)


def layer(change: Callable[[Layer], Layer]) -> Change:
    return lambda facts: replace(facts, layers=tuple(change(one) for one in facts.layers))


def window(by: int) -> Change:
    return layer(lambda one: replace(one, window=one.window and one.window + by))


def all_layers_rotate(facts: Architecture) -> Architecture:
    return layer(lambda one: replace(one, rope=facts.layers[0].rope))(facts)


def weights_as_they_are(facts: Architecture) -> Architecture:
    assert facts.experts is not None
    return replace(facts, experts=replace(facts.experts, renormalize=False))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param("mistral", window(+1), id="a window one too wide"),
        pytest.param("gemma3_text", window(-1), id="a window one too narrow"),
        pytest.param("phi3", layer(lambda one: replace(one, window=None)), id="no window"),
        pytest.param("gemma3_text", all_layers_rotate, id="one theta for both kinds of layer"),
        pytest.param("smollm3", all_layers_rotate, id="rope where there is none"),
        pytest.param("gemma2", fact(norm_offset=0.0), id="no norm offset"),
        pytest.param("gemma2", fact(attention_softcap=1.51), id="another cap of scores"),
        pytest.param("gemma2", fact(logits_softcap=4.01), id="another cap of logits"),
        pytest.param("gemma2", fact(attention_scale=None), id="scores by head size"),
        pytest.param("gemma2", fact(activation="silu"), id="another activation"),
        pytest.param("gemma3_text", fact(embedding_scale=9.8), id="another embedding scale"),
        pytest.param("granite", fact(residual_scale=0.301), id="another residual scale"),
        pytest.param("granite", fact(logits_divisor=2.501), id="another divisor of logits"),
        pytest.param("qwen3_moe", weights_as_they_are, id="experts' weights as they are"),
    ],
)
def test_a_small_error_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Change
) -> None:
    """The tolerance above has the power to find each fact that is a little wrong."""
    right = FAMILIES[name]
    family = tiny_family(tmp_path, name)
    wrong = replace(right, read=lambda fields: error(right.read(fields)))
    # A read-only mapping to everybody else.
    monkeypatch.setitem(FAMILIES, name, wrong)  # type: ignore[arg-type]

    assert max(errors(family)) > TOLERANCE
