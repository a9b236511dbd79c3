"""What transformers and peft say: one sequence at a time, eager attention, float64 unless asked."""

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_oracle(
    model: Path,
    adapter: Path | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    attention: str = "eager",
) -> PreTrainedModel:
    """The base, or peft over the base, in one dtype."""
    oracle = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=dtype,
        attn_implementation=attention,
        experts_implementation="eager",  # the grouped one has no float64
    )
    if adapter is not None:
        oracle = PeftModel.from_pretrained(oracle, adapter, autocast_adapter_dtype=False).to(dtype)
    return oracle.eval()


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits [T, V] of every position, as float64."""
    return oracle(input_ids=torch.tensor([token_ids])).logits[0].double()


@torch.inference_mode()
def oracle_greedy(oracle: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """The tokens that greedy decoding adds, end-of-sequence or not."""
    output = oracle.generate(
        input_ids=torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()
