"""Recorded step traces: of the tiny model under mixed traffic, and of the scheduler alone."""

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manylora.engine import SamplingParams
from manylora.engine.api import (
    AdapterInfo,
    AdapterRef,
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
)
from manylora.engine.recording import Header
from manylora.engine.sequence import Sequence as EngineSequence
from manylora.engine.simulation import compute
from manylora.engine.trace import StepTrace
from manylora.engine.trace_file import TraceFile
from support.engine import make_llm

TENANTS = ("a", "b", "c")


def mixed_requests(adapters: Sequence[AdapterInfo | None], *, count: int = 36) -> list[Request]:
    """Prompts that begin alike for a tenant, on several adapters, of three tenants."""
    rng = random.Random(3)
    shared = [[rng.randrange(250) for _ in range(20)] for _ in TENANTS]
    requests = []
    for number in range(count):
        adapter = rng.choice(adapters)
        own = [rng.randrange(250) for _ in range(rng.randrange(1, 8))]
        requests.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=(*shared[number % 3][: rng.randrange(4, 20)], *own),
                params=SamplingParams(
                    temperature=0,
                    max_tokens=rng.randrange(1, 24),
                    ignore_eos=True,
                    prompt_logprobs=1 if number % 5 == 0 else None,
                ),
                tenant=TENANTS[number % 3],
                adapter=None if adapter is None else adapter.ref,
                priority=number % 2,
                weight=1.0 + number % 3,
                cache_salt="salt" if number % 11 == 0 else None,
            )
        )
    return requests


def record_model(
    path: Path, model: Path, adapters: Mapping[str, Path], *, aborts: bool = True, **options: Any
) -> EngineStats:
    """Serve mixed traffic with a pool, slots and seats that are all too few, and some aborts."""
    values = {
        "max_loras": 2,
        "num_kv_blocks": 24,
        "block_size": 4,
        "max_num_batched_tokens": 24,
        "step_trace": str(path),
    }
    rng = random.Random(4)
    with make_llm(model, **(values | options)) as llm:
        infos = [llm.load_adapter(folder) for folder in adapters.values()]
        coming = mixed_requests([*infos, None])
        while coming or llm.core.has_work:
            while coming and rng.random() < 0.4:
                llm.core.add(coming.pop(0))
            alive = [*llm.core.scheduler.running, *llm.core.scheduler.waiting]
            if aborts and alive and rng.random() < 0.05:
                llm.core.abort(rng.choice(alive).request_id)
            llm.core.step()
        return llm.stats()


def make_header(**options: Any) -> Header:
    """A header for a scheduler without a model; tests name only what matters to them."""
    header = {
        "scheduling_policy": "fair",
        "enable_prefix_caching": True,
        "share_base_prefixes": False,
        "long_prefill_token_threshold": 0,
    }
    engine = {
        "block_size": 4,
        "num_kv_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_loras": 2,
    }
    for name, value in options.items():
        (header if name in header else engine)[name] = value
    info = EngineInfo(
        model="none",
        model_digest="base",
        dtype="float32",
        device="cpu",
        kernels="none",
        max_model_len=engine["block_size"] * engine["num_kv_blocks"],
        max_lora_rank=1,
        **engine,
    )
    return Header(at=100.0, unix_seconds=0.0, engine=info, **header)  # type: ignore[arg-type]


class RecordedScheduler:
    """A scheduler that is told what an engine would tell it, and whose every step is recorded.

    All texts are one book, so that prompts and outputs share prefixes.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int = 1 << 30) -> None:
        self.ready: set[str] = set()
        self.scheduler = header.scheduler(
            adapter_ready=lambda digest: digest in self.ready, cache_secret=b"secret"
        )
        self.trace = StepTrace(self.scheduler, TraceFile(path, header, max_bytes=max_bytes))
        self.max_tokens = header.engine.max_model_len
        self.now = header.at
        self.alive: dict[str, EngineSequence] = {}
        self.ends: dict[str, int] = {}  # output tokens, by request id
        self.num_added = 0

    def add(
        self,
        tenant: str,
        adapter: str | None,
        prompt: int,
        output: int,
        *,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> None:
        prompt = min(prompt, self.max_tokens - 1)
        output = min(output, self.max_tokens - prompt)
        name = f"r{self.num_added}"
        self.num_added += 1
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(map(book, range(prompt))),
            params=SamplingParams(
                max_tokens=self.max_tokens - prompt, prompt_logprobs=prompt_logprobs
            ),
            tenant=tenant,
            adapter=None if adapter is None else AdapterRef(adapter),
            **more,
        )
        sequence = EngineSequence(request=request, token_ids=list(request.prompt_token_ids))
        self.alive[name] = sequence
        self.ends[name] = output
        self.scheduler.add(sequence)
        self.trace.added(sequence, self.now)

    def remove(self, sequence: EngineSequence, reason: FinishReason) -> None:
        del self.alive[sequence.request_id]
        self.scheduler.remove(sequence)
        self.trace.removed(sequence, reason, self.now)

    def step(self) -> None:
        began = self.now
        self.trace.ready(self.ready, began)
        batch = self.scheduler.schedule()
        if batch.entries:
            self.trace.add(batch, began)
        self.now += 0.001
        for sequence in compute(batch, self.scheduler):
            sequence.token_ids.append(book(sequence.num_tokens))
            if sequence.num_output_tokens == self.ends[sequence.request_id]:
                sequence.finish(FinishReason.LENGTH)
                self.remove(sequence, FinishReason.LENGTH)
        self.trace.end_step(self.now, is_last=not self.alive)

    def abort(self, sequence: EngineSequence) -> None:
        self.remove(sequence, FinishReason.ABORT)

    def fail(self, sequence: EngineSequence) -> None:
        """As when its logits were not finite."""
        self.scheduler.prefixes.forget(sequence)
        self.trace.prefix_forgotten(sequence, self.now)
        self.remove(sequence, FinishReason.ERROR)

    def drop(self, adapter: str) -> None:
        slot = self.scheduler.slots.drop(adapter)
        if slot is not None:
            self.trace.slot_emptied(slot, adapter, self.now)

    def finish(self, *, adapters: set[str], close: bool = True, max_steps: int = 2000) -> None:
        """Step until all is done."""
        self.ready = adapters
        for _ in range(max_steps):
            if not self.alive:
                if close:
                    self.trace.close()
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def book(position: int) -> int:
    return position * 7 % 97


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording as plain data."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def record_crowd(path: Path, *, policy: str) -> RecordedScheduler:
    """Three tenants that want twice the KV blocks, seats and slots there are, with some aborts."""
    rng = random.Random(11)
    engine = RecordedScheduler(path, make_header(scheduling_policy=policy, num_kv_blocks=16))
    for number in range(24):
        engine.add(
            rng.choice(TENANTS),
            rng.choice(("x", "y", "z", None)),
            rng.randrange(4, 30),
            rng.randrange(2, 16),
            priority=number % 2,
        )
        engine.ready |= {rng.choice("xyz")}
        if number % 8 == 7:
            engine.abort(rng.choice(list(engine.alive.values())))
        for _ in range(rng.randrange(5)):
            engine.step()
    engine.finish(adapters={"x", "y", "z"})
    engine.trace.close()
    return engine


if __name__ == "__main__":  # python -m support.recorded FILE POLICY
    record_crowd(Path(sys.argv[1]), policy=sys.argv[2])
