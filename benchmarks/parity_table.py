"""Prints how far every supported family is from transformers, in every mode of batching.

    python benchmarks/parity_table.py [MODEL_TYPE ...]

Tiny random models of each family, with what sets it apart switched on. A number is
max |logits - oracle| over max |oracle|, over every position; the oracle is transformers' eager
attention (and peft) in float64. Ours is float32 but in one column, beside which stands the error of
transformers in bfloat16: there a near tie between experts may go either way. "decode" compares
greedy tokens instead: how many of them agree.
"""

import sys
import tempfile
from pathlib import Path

import manylora.kernels  # isort: skip  # noqa: F401 -- sets oneMKL up before its first call
import torch
from torch import Tensor
from transformers.utils import logging

from manylora.engine import SamplingParams
from manylora.engine.models.families import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.engine import largest_error, make_llm, prompt_logits
from support.oracle import load_oracle, oracle_greedy, oracle_logits
from support.tiny_families import make_tiny_family
from support.tiny_model import make_adapter

PROMPT_TOKENS = (160, 3, 33)  # unequal: beyond a chunk of keys and a window, tiny, between
NEW_TOKENS = 32
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, 256, (length,), generator=generator).tolist() for length in PROMPT_TOKENS
    ]


def error(
    folder: Path, expected: list[Tensor], adapter: Path | None = None, **options: object
) -> str:
    """The largest error over the prompts, all in one batch; with an adapter, on every second."""
    with make_llm(folder, **options) as llm:
        info = None if adapter is None else llm.load_adapter(adapter)
        used = [info if index % 2 == 0 else None for index in range(len(expected))]
        ours = prompt_logits(llm, prompts(), used)
    return f"{max(map(largest_error, ours, expected)):.1e}"


def decoded(folder: Path) -> str:
    """How many greedy tokens agree with transformers'."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with make_llm(folder) as llm:
        results = llm.generate(prompts(), params)
    oracle = load_oracle(folder)
    agree = total = 0
    for prompt, result in zip(prompts(), results, strict=True):
        expected = oracle_greedy(oracle, prompt, NEW_TOKENS)
        agree += sum(map(int.__eq__, result.outputs[0].token_ids, expected))
        total += NEW_TOKENS
    return f"{agree}/{total}"


def row(name: str, folder: Path) -> list[str]:
    """A family's cells, in the order of `HEADINGS`."""
    model = make_tiny_family(folder / "model", name)
    linear = ATTENTION if name in ("qwen3_moe", "mixtral") else "all-linear"
    adapter = make_adapter(model, folder / "adapter", target_modules=linear)
    base, adapted = load_oracle(model), load_oracle(model, adapter)
    expected = [oracle_logits(base, prompt) for prompt in prompts()]
    mixed = [
        oracle_logits(base if index % 2 else adapted, prompt)
        for index, prompt in enumerate(prompts())
    ]
    coarse = load_oracle(model, dtype=torch.bfloat16)
    theirs = [oracle_logits(coarse, prompt) for prompt in prompts()]
    return [
        name,
        error(model, expected, max_num_batched_tokens=256),
        error(model, expected, max_num_batched_tokens=7, max_num_seqs=7),
        error(model, expected, max_num_batched_tokens=1, max_num_seqs=1),
        error(model, mixed, adapter, max_num_batched_tokens=96),
        error(model, expected, dtype="bfloat16", max_num_batched_tokens=256),
        f"{max(map(largest_error, theirs, expected)):.1e}",
        decoded(model),
    ]


HEADINGS = (
    "family",
    "whole",
    "by 7",
    "by 1",
    "adapter and base",
    "bfloat16",
    "bfloat16, theirs",
    "decode",
)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print("| " + " | ".join(row(name, Path(folder))) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
