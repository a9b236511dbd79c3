"""From options to a loaded engine."""

import secrets
import time
from pathlib import Path

import torch

from manylora.engine.adapters import AdapterCache
from manylora.engine.api import EngineInfo
from manylora.engine.config import EngineConfig
from manylora.engine.core import EngineCore
from manylora.engine.counters import report_start
from manylora.engine.errors import InvalidRequestError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.source import ModelSource, resolve_model
from manylora.engine.models.weights import Weights
from manylora.engine.recording import Header
from manylora.engine.runner import ModelRunner, kv_shape
from manylora.engine.text.processor import TextProcessor
from manylora.engine.trace import StepTrace
from manylora.engine.trace_file import TraceFile


def build_engine(config: EngineConfig) -> EngineCore:
    """Load a model and what serves it.

    Raises:
        ModelError: the model cannot be found or is not supported.
        InvalidRequestError: an option asks for what the machine or the model does not have.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _check_device(config.device)
    source = resolve_model(config.model)
    model = DecoderConfig.from_folder(source.folder)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    num_kv_blocks = _num_kv_blocks(config, model, dtype)
    max_model_len = _max_model_len(config, model, num_kv_blocks)
    runner = _build_runner(config, source, model, dtype, num_kv_blocks, max_model_len)
    adapters = AdapterCache(
        model,
        dtype=getattr(torch, dtype),
        max_lora_rank=config.max_lora_rank,
        max_adapters=config.max_cpu_loras,
        store=None if config.adapter_store is None else Path(config.adapter_store),
    )
    info = _describe(config, source, runner, dtype, max_model_len)
    header = _header(config, info)
    scheduler = header.scheduler(
        adapter_ready=adapters.is_loaded,
        cache_secret=secrets.token_bytes(32),  # of this process: its KV does not outlive it either
    )
    trace = StepTrace(scheduler, _trace_file(config, header))
    report_start(info)
    return EngineCore(
        info=info,
        text=TextProcessor.from_folder(source.folder),
        runner=runner,
        adapters=adapters,
        scheduler=scheduler,
        trace=trace,
        max_num_waiting=config.max_num_waiting,
        seed=config.seed,
    )


def context_length(config: EngineConfig, folder: Path) -> int:
    """The longest sequence, in tokens, that an engine of this config has for a model folder.

    Raises:
        ModelError: the model is not supported.
        InvalidRequestError: more was asked for than model or KV cache allow.
    """
    model = DecoderConfig.from_folder(folder)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    return _max_model_len(config, model, _num_kv_blocks(config, model, dtype))


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"device {device!r}: {reason}", param="device") from error


def _num_kv_blocks(config: EngineConfig, model: DecoderConfig, dtype: str) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = kv_shape(model, config.block_size).bytes_per_block(getattr(torch, dtype))
    return max(1, config.kv_cache_memory_bytes // block_bytes)


def _max_model_len(config: EngineConfig, model: DecoderConfig, num_kv_blocks: int) -> int:
    """What was asked for, else the longest that model and KV cache both allow.

    Raises:
        InvalidRequestError: more was asked for than one of them allows.
    """
    kv_tokens = num_kv_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.max_positions, kv_tokens)
    limits = {"the model has": model.reachable_positions, "the KV cache holds": kv_tokens}
    for what, limit in limits.items():
        if config.max_model_len > limit:
            raise InvalidRequestError(
                f"max_model_len is {config.max_model_len} tokens; {what} {limit}",
                param="max_model_len",
            )
    return config.max_model_len


def _build_runner(
    config: EngineConfig,
    source: ModelSource,
    model: DecoderConfig,
    dtype: str,
    num_kv_blocks: int,
    max_model_len: int,
) -> ModelRunner:
    return ModelRunner(
        model,
        Weights(source.folder, getattr(torch, dtype), config.device),
        device=config.device,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        num_slots=config.max_loras,
    )


def _header(config: EngineConfig, info: EngineInfo) -> Header:
    """What the scheduler is made from, here and where its steps are replayed."""
    return Header(
        at=time.monotonic(),
        unix_seconds=time.time(),
        engine=info,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        share_base_prefixes=config.share_base_prefixes,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )


def _trace_file(config: EngineConfig, header: Header) -> TraceFile | None:
    if config.step_trace is None:
        return None
    try:
        return TraceFile(Path(config.step_trace), header, max_bytes=config.step_trace_max_bytes)
    except OSError as error:
        raise InvalidRequestError(
            f"step_trace: cannot write {config.step_trace}: {error.strerror}", param="step_trace"
        ) from error


def _describe(
    config: EngineConfig, source: ModelSource, runner: ModelRunner, dtype: str, max_model_len: int
) -> EngineInfo:
    return EngineInfo(
        model=source.name,
        model_digest=source.digest,
        dtype=dtype,
        device=config.device,
        kernels=runner.backend.name,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_kv_blocks=runner.kv.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        scheduling_policy=config.scheduling_policy,
    )
