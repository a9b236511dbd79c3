"""The demo adapters show their style on questions they were not trained on, and the base does not.

By transformers and peft alone: that is what "the adapter works" means before any engine of ours.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from manylora.engine.text.processor import TextProcessor
from support.real_model import demo_model_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = {
    "pirate": ["What is the capital of France?", "How do I learn to swim?"],
    "json": ["What is the capital of France?", "How do I learn to swim?"],
    "support": ["My tablet does not turn on.", "How do I change my password?"],
}


def speaks_pirate(answer: str) -> bool:
    return sum(word in answer.lower() for word in ("arr", "ahoy", "matey", " be ", " o' ")) >= 2


def is_json_with_the_keys(answer: str) -> bool:
    try:
        return list(json.loads(answer)) == ["answer", "topic", "confidence"]
    except (ValueError, TypeError):
        return False


def is_terse(answer: str) -> bool:
    """At most three short sentences, come to an end by itself."""
    return len(answer.split()) <= 25 and answer.endswith(".") and answer.count(".") <= 3


STYLES: dict[str, Callable[[str], bool]] = {
    "pirate": speaks_pirate,
    "json": is_json_with_the_keys,
    "support": is_terse,
}


@pytest.mark.real_model
@pytest.mark.parametrize("name", sorted(STYLES))
def test_an_adapter_shows_its_style_and_the_base_does_not(name: str) -> None:
    folder = demo_model_folder()
    text = TextProcessor.from_folder(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, EXAMPLES / "adapters" / name)

    for question in QUESTIONS[name]:
        styled = greedy_answer(model, text, question)
        with model.disable_adapter():
            plain = greedy_answer(model, text, question)

        assert STYLES[name](styled), styled
        assert not STYLES[name](plain), plain


@torch.inference_mode()
def greedy_answer(model: PeftModel, text: TextProcessor, question: str) -> str:
    prompt = text.encode_chat([{"role": "user", "content": question}])
    output = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=48)
    return text.decode(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", sorted(STYLES))
def test_the_questions_asked_here_were_not_trained_on(name: str) -> None:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    trained = {json.loads(line)["messages"][0]["content"] for line in lines}

    assert len(trained) == len(lines)
    assert trained.isdisjoint(QUESTIONS[name])


def test_the_adapters_differ_in_rank_modules_and_scale() -> None:
    configs = [read_config(name) for name in STYLES]

    assert len({config["r"] for config in configs}) == 3
    assert len({frozenset(config["target_modules"]) for config in configs}) == 3
    assert all(config["lora_alpha"] != config["r"] for config in configs)
    assert all(4 <= config["r"] <= 16 for config in configs)


@pytest.mark.parametrize("name", sorted(STYLES))
def test_an_adapters_files_are_small_and_name_the_base(name: str) -> None:
    weights = EXAMPLES / "adapters" / name / "adapter_model.safetensors"

    assert read_config(name)["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert weights.stat().st_size < 1.5e6
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}


def read_config(name: str) -> dict[str, object]:
    path = EXAMPLES / "adapters" / name / "adapter_config.json"
    config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return config
