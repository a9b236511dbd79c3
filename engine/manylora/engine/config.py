"""Every engine option: name, unit, default. The names are vLLM's where vLLM has the thing.

Standard library only; the command line, environment variables and TOML keys are made from it.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from manylora.engine.errors import InvalidRequestError

POLICIES = ("fair", "fcfs", "priority")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def _option(default: Any, text: str) -> Any:
    """A field with its default and the help text shown on the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    Raises:
        InvalidRequestError: an option is out of its range; `param` names it.
    """

    model: str = _option("demo", "local Hugging Face folder, GGUF file, hub id, or 'demo'")
    dtype: str = _option("auto", "auto, bfloat16, float16, float32 or float64")
    device: str = _option("cpu", "where the model runs: cpu, cuda, cuda:1")
    max_model_len: int | None = _option(None, "longest sequence in tokens; default: the model's")
    block_size: int = _option(16, "tokens in one KV block")
    num_kv_blocks: int | None = _option(None, "KV blocks; default: from kv-cache-memory-bytes")
    kv_cache_memory_bytes: int = _option(1 << 30, "bytes for the KV cache")
    max_num_seqs: int = _option(32, "most sequences in one step")
    max_num_batched_tokens: int = _option(256, "most tokens in one step")
    long_prefill_token_threshold: int = _option(
        0, "most prompt tokens of one sequence in a step while others are there; 0: no limit"
    )
    scheduling_policy: str = _option(
        "fair", "who goes first: fair (between tenants), fcfs or priority"
    )
    max_num_waiting: int = _option(1024, "most requests in the queue; beyond it they are refused")
    enable_prefix_caching: bool = _option(True, "reuse the KV blocks of a tenant's common prefixes")
    share_base_prefixes: bool = _option(
        False, "let all tenants share the base model's cached prefixes; times then tell of others"
    )
    max_loras: int = _option(8, "adapter slots on the device")
    max_cpu_loras: int = _option(64, "adapters kept in host memory")
    max_lora_rank: int = _option(64, "highest adapter rank accepted")
    adapter_store: str | None = _option(None, "folder of checked adapters, one folder per digest")
    step_trace: str | None = _option(None, "file to record all steps in, for `manylora replay`")
    step_trace_max_bytes: int = _option(1 << 28, "most bytes of that file; then it ends")
    threads: int | None = _option(None, "CPU threads; default: one per core")
    seed: int = _option(0, "seed of requests that bring none")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidRequestError(f"dtype must be one of {', '.join(DTYPES)}", param="dtype")
        if self.scheduling_policy not in POLICIES:
            raise InvalidRequestError(
                f"scheduling_policy must be one of {', '.join(POLICIES)}", param="scheduling_policy"
            )
        for name in (
            "max_model_len",
            "block_size",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_waiting",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "step_trace_max_bytes",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1", param=name)
        if self.long_prefill_token_threshold < 0:
            raise InvalidRequestError(
                "long_prefill_token_threshold must be at least 0",
                param="long_prefill_token_threshold",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                "max_num_batched_tokens must be at least max_num_seqs: each running sequence "
                "gets its token every step",
                param="max_num_batched_tokens",
            )


def check_option_names(names: Iterable[str]) -> None:
    """
    Raises:
        InvalidRequestError: `EngineConfig` has no option of a name; the nearest is told.
    """
    known = [option.name for option in fields(EngineConfig)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise InvalidRequestError(f"{name} is no option of the engine{meant}", param=name)
