"""Tiny random models and adapters, made by transformers and peft, whose answers are the oracle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 260  # every byte, and the special tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
"""Odd sizes on purpose: three query heads to a KV head, a width that is no power of two."""


def make_tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A random Llama with a byte-level tokenizer, saved as a Hugging Face folder in float32."""
    return make_tiny_model(folder, "llama", seed=seed, **config)


def make_tiny_model(folder: Path, model_type: str, *, seed: int = 0, **config: Any) -> Path:
    """The same for any model type that transformers has."""
    torch.manual_seed(seed)
    values = SIZES | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    offset = 1.0 if model_type.startswith("gemma") else 0.0  # which its norms add to their weight
    for name, parameter in model.named_parameters():
        # The defaults are so small that all logits are alike.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5 - offset, 1.5 - offset)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then <|im_start|>, <|im_end|> (which ends an answer), two spare."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|spare_a|>", "<|spare_b|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_adapter(model: Path, folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """A PEFT adapter with random A and B over a model folder; alpha differs from r on purpose."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
    }
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft_model = get_peft_model(base, LoraConfig(**(values | config)))
    peft_model.save_pretrained(folder)
    return folder


ADAPTER_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "mlp": {"r": 7, "lora_alpha": 5, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "all": {"r": 16, "lora_alpha": 24, "target_modules": "all-linear", "use_rslora": True},
}
"""Adapters that differ in modules, rank, oddness of rank, and scale rule."""
