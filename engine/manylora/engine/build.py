"""From options to a loaded engine."""

from pathlib import Path

import torch

from manylora.engine.adapters import AdapterCache
from manylora.engine.api import EngineInfo
from manylora.engine.blocks import BlockPool
from manylora.engine.config import EngineConfig
from manylora.engine.core import EngineCore
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.source import ModelSource, resolve_model
from manylora.engine.models.weights import open_weights
from manylora.engine.runner import ModelRunner
from manylora.engine.scheduler import Scheduler
from manylora.engine.slots import AdapterSlots
from manylora.engine.text.processor import TextProcessor


def build_engine(config: EngineConfig) -> EngineCore:
    """Load a model and what serves it.

    Raises:
        ModelError: the model cannot be found or is not supported.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    source = resolve_model(config.model)
    model = DecoderConfig.from_folder(source.folder)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    max_model_len = min(config.max_model_len or model.max_positions, model.max_positions)
    runner = _build_runner(config, source, model, dtype, max_model_len)
    adapters = AdapterCache(
        model,
        max_lora_rank=config.max_lora_rank,
        max_adapters=config.max_cpu_loras,
        store=None if config.adapter_store is None else Path(config.adapter_store),
    )
    return EngineCore(
        info=_describe(config, source, runner, dtype, max_model_len),
        text=TextProcessor.from_folder(source.folder),
        runner=runner,
        adapters=adapters,
        scheduler=_build_scheduler(config, source, runner, adapters, dtype),
        max_num_waiting=config.max_num_waiting,
        seed=config.seed,
    )


def _build_runner(
    config: EngineConfig,
    source: ModelSource,
    model: DecoderConfig,
    dtype: str,
    max_model_len: int,
) -> ModelRunner:
    return ModelRunner(
        model,
        open_weights(source.folder, getattr(torch, dtype), config.device),
        device=config.device,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_model_len=max_model_len,
        num_slots=config.max_loras,
    )


def _build_scheduler(
    config: EngineConfig,
    source: ModelSource,
    runner: ModelRunner,
    adapters: AdapterCache,
    dtype: str,
) -> Scheduler:
    blocks = BlockPool(
        runner.kv.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching
    )
    return Scheduler(
        blocks,
        AdapterSlots(config.max_loras),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        base_digest=source.digest,
        kv_dtype=dtype,
        adapter_ready=adapters.is_loaded,
    )


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
    )
