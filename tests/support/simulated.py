"""Scheduler, blocks and slots for simulations: tests name only what matters to them."""

import itertools
from typing import Any

from manylora.engine.api import AdapterRef, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.policy import POLICIES
from manylora.engine.scheduler import Scheduler
from manylora.engine.simulation import Arrival
from manylora.engine.slots import AdapterSlots

_numbers = itertools.count()


def make_scheduler(
    *,
    policy: str = "fair",
    num_kv_blocks: int = 1024,
    block_size: int = 16,
    max_loras: int = 8,
    prefix_caching: bool = False,
    **options: Any,
) -> Scheduler:
    values: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 256}
    return Scheduler(
        BlockPool(num_kv_blocks, block_size, prefix_caching=prefix_caching),
        AdapterSlots(max_loras),
        policy=POLICIES[policy](),
        base_digest="base",
        kv_dtype="float32",
        adapter_ready=lambda digest: True,
        **(values | options),
    )


def arrival(
    at: float,
    tenant: str,
    *,
    prompt: int | list[int],
    output: int,
    max_tokens: int | None = None,
    adapter: str | None = None,
    weight: float = 1.0,
    priority: int = 0,
) -> Arrival:
    """A request; a prompt of so many tokens shares none of them with another's."""
    number = next(_numbers)
    tokens = [number + 1] * prompt if isinstance(prompt, int) else prompt
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(max_tokens=max_tokens or output),
        tenant=tenant,
        adapter=None if adapter is None else AdapterRef(adapter),
        weight=weight,
        priority=priority,
    )
    return Arrival(at, request, output)
