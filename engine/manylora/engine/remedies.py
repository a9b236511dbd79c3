"""What would have spared the recorded window its preemptions, computed knob by knob.

The window is what arrived lately, with its lengths; `project` replays it in whole sequences instead
of steps, so that a value takes microseconds to try.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from manylora.engine.api import EngineInfo, Remedies

_KV_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Demanded:
    """One request of the window. Lengths in tokens."""

    order: int  # among all arrivals
    arrival_step: int
    num_prompt_tokens: int
    num_tokens: int  # at its end, as it was or as it is expected to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The options that decide how much KV is wanted, and how much there is."""

    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line, and what alone would have spared the window preemptions."""

    remedy: str  # in plain words
    option: str
    now: str | int
    value: str | int | None  # None: no value of this option helps


def as_options(found: Remedies, info: EngineInfo) -> tuple[Option, ...]:
    """The remedies as options, each with its value; the last two are ways to the same one."""
    less_kv = f"less KV a token, {found.kv_bytes_factor:.2f} of its bytes"
    dtype = _smaller_dtype(info.dtype, found.kv_bytes_factor)
    if dtype is not None:
        num_blocks = info.num_kv_blocks * _KV_BYTES[info.dtype] // _KV_BYTES[dtype]
        dtype = f"{dtype} with --num-kv-blocks {num_blocks} in the same memory"
    return (
        Option("more KV blocks", "--num-kv-blocks", info.num_kv_blocks, found.num_kv_blocks),
        Option("fewer sequences at once", "--max-num-seqs", info.max_num_seqs, found.max_num_seqs),
        Option(
            "smaller steps",
            "--max-num-batched-tokens",
            info.max_num_batched_tokens,
            found.max_num_batched_tokens,
        ),
        Option(less_kv, "--dtype", info.dtype, dtype),
        Option(less_kv, "--max-model-len", info.max_model_len, found.max_model_len),
    )


def project(window: Sequence[Demanded], knobs: Knobs) -> int:
    """The most KV blocks that the window would hold at once if there were always enough.

    Prompts are computed one after the other with what the decodes leave of each step's budget;
    then each sequence gets a token a step until it ends. Time is counted in steps.
    """
    ends: list[tuple[float, float]] = []  # (when, tokens of the sequence less the time)
    peak = prefilled = level = 0.0

    def wanted(now: float) -> float:
        """Blocks held now, each sequence's last one counted whole."""
        return (level + len(ends) * (now + knobs.block_size - 1)) / knobs.block_size

    def end_next() -> float:
        nonlocal peak, level
        peak = max(peak, wanted(ends[0][0]))
        when, offset = heappop(ends)
        level -= offset
        return when

    for request in sorted(window, key=lambda demanded: demanded.order):
        length = min(request.num_tokens, knobs.max_model_len)
        prompt = min(request.num_prompt_tokens, length)
        start = max(float(request.arrival_step), prefilled)
        if len(ends) == knobs.max_num_seqs:
            start = max(start, end_next())
        while ends and ends[0][0] <= start:
            end_next()
        prefilled = start + prompt / max(1, knobs.max_num_batched_tokens - len(ends))
        while ends and ends[0][0] <= prefilled:
            end_next()
        heappush(ends, (prefilled + length - prompt, prompt - prefilled))
        level += prompt - prefilled
        peak = max(peak, wanted(prefilled))
    while ends:
        end_next()
    return int(peak)


def find_remedies(window: Sequence[Demanded], knobs: Knobs, *, shared: float = 1.0) -> Remedies:
    """The value of each knob that needs no more KV blocks than there are, the others as they are.

    Args:
        shared: distinct blocks for each block held, less than 1 where sequences share prefixes.
    """

    def fits(**changed: int) -> bool:
        tried = replace(knobs, **changed)
        return shared * project(window, tried) <= knobs.num_kv_blocks

    peak = max(1, round(shared * project(window, knobs)))
    return Remedies(
        num_kv_blocks=max(peak, knobs.num_kv_blocks + 1),
        max_num_seqs=_largest(lambda n: fits(max_num_seqs=n), 1, knobs.max_num_seqs - 1),
        max_num_batched_tokens=_largest(
            lambda n: fits(max_num_batched_tokens=n),
            knobs.max_num_seqs,
            knobs.max_num_batched_tokens - 1,
        ),
        max_model_len=_largest(
            lambda n: fits(max_model_len=n),
            1 + max(demanded.num_prompt_tokens for demanded in window),
            knobs.max_model_len - 1,
        ),
        kv_bytes_factor=min(1.0, knobs.num_kv_blocks / peak),
    )


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number of [low, high] that fits, if smaller ones fit wherever larger ones do."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _smaller_dtype(dtype: str, factor: float) -> str | None:
    now = _KV_BYTES[dtype]
    fit = (name for name, size in _KV_BYTES.items() if size < now and size <= factor * now)
    return next(fit, None)
