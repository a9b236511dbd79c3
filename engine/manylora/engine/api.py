"""What crosses the engine's boundary: plain frozen data, standard library only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from manylora.engine.errors import InvalidRequestError
from manylora.engine.lifecycle import Stage, WaitCause

MAX_INT = (1 << 63) - 1  # what the wire carries


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's context
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine gave this request up


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose each token. `temperature=0` is greedy; the other names are OpenAI's or vLLM's.

    Raises:
        InvalidRequestError: a value is out of its range; `param` names it.
    """

    n: int = 1  # completions of one prompt, each with a seed of its own; see `completions.py`
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit; -1, as vLLM writes it, becomes 0
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output, as the next
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    min_tokens: int = 0  # before any token or stop string may end it
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False  # what ended it, token or string, belongs to the text
    skip_special_tokens: bool = True  # they have no text
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report for each token
    prompt_logprobs: int | None = None  # the same for each prompt token but the first

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in _WHOLE_NUMBERS:
            _whole(name, getattr(self, name))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _in_range("n", self.n, 1, 128)
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("temperature", self.temperature, 0, 2)
        _in_range("top_p", self.top_p, 0, 1)
        _in_range("top_k", self.top_k, 0, None)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, 0, None)
            _in_range("logit_bias", bias, -100, 100)
        _in_range("seed", self.seed, -MAX_INT, None)
        _in_range("logprobs", self.logprobs, 0, 20)
        _in_range("prompt_logprobs", self.prompt_logprobs, 0, 20)
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, None)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be greater than 0", param="top_p")
        if "" in stop:
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        try:
            "".join(stop).encode()
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise InvalidRequestError("a stop string is not valid Unicode", param="stop") from error


_WHOLE_NUMBERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")


def _whole(name: str, value: object) -> None:
    if value is not None and type(value) is not int:
        raise InvalidRequestError(f"{name} must be a whole number", param=name)


def _in_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if not low <= value <= (MAX_INT if high is None else high):  # NaN fails both
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bound}", param=name)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as the engine knows it: the SHA-256 (hex) of its canonical weights and config."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate. `request_id` is made by the server and unique."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str
    adapter: AdapterRef | None = None  # None: the base model, by name
    weight: float = 1.0  # of the tenant, under the fair scheduling policy
    priority: int = 0  # under the priority scheduling policy; the lowest goes first
    cache_salt: str | None = None  # shares cached prefixes only with requests of the same salt

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise InvalidRequestError("weight must be a positive number", param="weight")
        if self.params.n != 1:
            raise InvalidRequestError("a request is one completion: its n must be 1", param="n")
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if min(self.prompt_token_ids) < 0 or max(self.prompt_token_ids) > MAX_INT:
            raise InvalidRequestError("a prompt token id is out of range", param="prompt")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, with the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request inside the engine, in seconds from its arrival there.

    `queued_by_cause` splits all the time in which it waited, also after a preemption; its values
    sum to `queued_seconds`. `stages` are those since the output before.
    """

    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    num_preemptions: int = 0
    queued_by_cause: Mapping[WaitCause, float] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one or more steps added to a request: a delta, never the whole.

    `text` may lag behind `token_ids` while it could still be half a character or the start of a
    stop string. The counts are totals so far; `num_output_tokens` includes the tokens that
    completed a stop string. `prompt_logprobs`, where asked for, come with the first token: one for
    each prompt token, None for the first, which nothing came before.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    metrics: RequestMetrics = RequestMetrics()

    def merged_with(self, later: "RequestOutput") -> "RequestOutput":
        """Both deltas as one, for a reader that was too slow for the first."""
        return RequestOutput(
            request_id=self.request_id,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            error=later.error,
            num_prompt_tokens=later.num_prompt_tokens,
            num_cached_tokens=later.num_cached_tokens,
            num_output_tokens=later.num_output_tokens,
            metrics=replace(later.metrics, stages=self.metrics.stages + later.metrics.stages),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A checked adapter: its digest and the coverage report of what will be applied."""

    digest: str
    report: dict[str, Any]

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine process lives."""

    model: str
    model_digest: str
    dtype: str
    device: str
    kernels: str
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_lora_rank: int
    scheduling_policy: str = "fair"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStats:
    """One adapter slot: what lies in it and how many running sequences hold it."""

    slot: int
    digest: str | None = None
    holds: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What would have spared the recorded window its preemptions: one value for each knob.

    None: no value of this knob does.
    """

    num_kv_blocks: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    kv_bytes_factor: float  # of today's bytes for a token's KV, what may be used


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_STEP_SIZES = len(STEP_TOKEN_BOUNDS) + 1  # bigger ones, too


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_cause: Mapping[WaitCause, int] = field(default_factory=dict)
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # computed in all steps, recomputed ones too
    steps_by_tokens: tuple[int, ...] = (0,) * NUM_STEP_SIZES  # by the first bound that holds them
    num_preemptions: int = 0
    recomputed_tokens: int = 0  # computed once more after preemptions
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache, first time only
    prefix_hit_tokens: int = 0
    queued_seconds_by_cause: Mapping[WaitCause, float] = field(default_factory=dict)  # total
    adapter_loads: int = 0  # into host memory
    slot_fills: int = 0  # from there into a slot
    uptime_seconds: float = 0.0
    remedies: Remedies | None = None  # of the latest shortage of KV blocks that was told
    slots: tuple[SlotStats, ...] = ()
    host_digests: tuple[str, ...] = field(default=())  # adapters in the host cache
