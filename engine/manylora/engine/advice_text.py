"""How `manylora advise` prints its advice: a table by tenant and adapter, and plain sentences."""

from collections.abc import Iterator

from manylora.engine.advise import ENOUGH_REQUESTS, Advice, Change, GroupAdvice

EVICTION_MATTERS = 0.01  # of the prompt tokens, found only in a larger pool
_HEAD = (
    *("tenant", "adapter", "requests", "prompt", "hits", "unevicted"),
    *("prefill saved", "first token, mean", "first token, p95", "overhead"),
)


def advice_text(advice: Advice) -> str:
    """Several lines, the last without its end."""
    return "\n".join(_lines(advice))


def _lines(advice: Advice) -> Iterator[str]:
    if not advice.groups:
        yield "no request ran in this recording"
        return
    yield (
        f"{advice.num_steps} steps: a step takes {_seconds(advice.step_seconds)} and "
        f"{_seconds(advice.token_seconds)} for each token"
    )
    if advice.recorded_with_caching:
        yield (
            f"recorded with prefix caching, which found {_percent(advice.recorded_hit_rate)} of "
            f"the prompt tokens; served again in virtual time it finds {_percent(advice.hit_rate)}"
        )
    else:
        yield (
            "recorded without prefix caching, which would find "
            f"{_percent(advice.hit_rate)} of the prompt tokens"
        )
    yield _about_eviction(advice)
    yield ""
    yield from _table([_HEAD, *(_row(group) for group in advice.groups)])
    in_vain = [group for group in advice.groups if group.hit_tokens == 0]
    if in_vain:
        yield ""
    for group in in_vain:
        yield _about_misses(group)


def _about_misses(group: GroupAdvice) -> str:
    """Of one that hit nothing: whether that says anything of prefix caching."""
    text = f"{group.tenant} on {_adapter(group)} hit nothing in {_count(group.requests)}"
    if group.hit_rate_unevicted:
        return f"{text}: {_percent(group.hit_rate_unevicted)} had been evicted before"
    if not group.is_pure_overhead:
        return (
            f"{text}: too few to call prefix caching pure overhead (fewer than {ENOUGH_REQUESTS})"
        )
    cost = _magnitude(group.overhead_seconds)
    return f"pure overhead: {text}, for {cost} of hashing and looking up"


def _about_eviction(advice: Advice) -> str:
    text = f"had nothing been evicted, it would be {_percent(advice.hit_rate_unevicted)}"
    blocks = f"the {advice.num_kv_blocks} KV blocks"
    short = f"{_count(advice.requests_short_of_blocks)} waited for some or gave some back"
    if advice.hit_rate_unevicted - advice.hit_rate > EVICTION_MATTERS:
        text += f": {blocks} are the limit"
        return f"{text}, and {short}" if advice.requests_short_of_blocks else text
    if advice.requests_short_of_blocks:
        return f"{text}; of {blocks}, though, {short}"
    return f"{text}: {blocks} are not the limit"


def _row(group: GroupAdvice) -> tuple[str, ...]:
    saved = group.prefill_seconds.off - group.prefill_seconds.on
    part = saved / group.prefill_seconds.off if group.prefill_seconds.off else 0.0
    return (
        group.tenant,
        _adapter(group),
        str(group.requests),
        str(group.prompt_tokens),
        _percent(group.hit_rate),
        _percent(group.hit_rate_unevicted),
        f"{_seconds(saved)} ({_percent(part)})",
        _change(group.first_token_mean_seconds),
        _change(group.first_token_p95_seconds),
        _magnitude(group.overhead_seconds),
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)  # names left, numbers right
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _adapter(group: GroupAdvice) -> str:
    return "base" if group.adapter is None else group.adapter[:12]


def _change(change: Change) -> str:
    return f"{_seconds(change.off)} -> {_seconds(change.on)}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _count(requests: int) -> str:
    return f"{requests} request{'s' * (requests != 1)}"


def _magnitude(seconds: float) -> str:
    """To one figure: what was measured on a machine that also does other things."""
    number, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"~{float(f'{number:.1g}'):g} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.2f} ms"
