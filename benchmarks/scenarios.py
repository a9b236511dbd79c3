"""The four scenarios behind the seed's two fears: a long prompt, and a full KV cache."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from random_adapters import load_random_adapters
from report import Check, Finding, percentile, summary
from traffic import Timeline, Traffic

from manylora.engine.core import EngineCore

Start = Callable[..., Traffic]  # on a new engine, its options by name
BLOCK_SIZE = 16
WORDS = ("the", "old", "river", "ran", "past", "stone", "towers", "while", "people", "baked")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptSizes:
    rounds: int = 3
    streams: int = 8
    stream_prompt: int = 64
    long_prompt: int = 4000
    quiet_steps: int = 40


def long_prompt(start: Start, sizes: LongPromptSizes) -> Finding:
    """Inter-token time of decoding streams, before and while a long prompt is computed."""
    room = sizes.long_prompt + sizes.streams * (sizes.stream_prompt + sizes.long_prompt)
    traffic = start(num_kv_blocks=_blocks(room))
    quiet, loud, ratios, first_tokens = [], [], [], []
    for number in range(sizes.rounds):
        one_quiet, one_loud, first_token = _long_prompt_round(traffic, sizes, number)
        quiet += one_quiet
        loud += one_loud
        ratios.append(percentile(one_loud, 99) / percentile(one_quiet, 99))
        first_tokens.append(first_token)
    traffic.core.close()
    numbers = {
        "p99_ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
        "p50_ratio": round(median(loud) / median(quiet), 3),
        "quiet_gap_seconds": summary(quiet),
        "loud_gap_seconds": summary(loud),
        "long_prompt_first_token_seconds": [round(seconds, 3) for seconds in first_tokens],
        "long_prompt_tokens_per_second": round(sizes.long_prompt / median(first_tokens), 1),
    }
    check = Check("p99 inter-token time, loud over quiet", median(ratios), "at most", 1.5)
    measures = "time between two tokens of a stream; quiet is the same streams just before"
    return Finding("long_prompt", measures, (check,), numbers)


def _long_prompt_round(
    traffic: Traffic, sizes: LongPromptSizes, number: int
) -> tuple[list[float], list[float], float]:
    """Quiet gaps, loud gaps, and the long prompt's time to first token, in seconds."""
    streams = [
        traffic.submit(
            f"stream-{number}-{i}", traffic.random_tokens(sizes.stream_prompt), sizes.long_prompt
        )
        for i in range(sizes.streams)
    ]
    for stream in streams:
        traffic.step_until_first_token(stream)
    began = traffic.clock()
    for _ in range(sizes.quiet_steps):
        traffic.step()
    prompt = traffic.random_tokens(sizes.long_prompt)
    late = traffic.submit(f"long-{number}", prompt, 1)
    first_token = traffic.step_until_first_token(late)
    traffic.abort_all()
    quiet = [gap for stream in streams for gap in stream.gaps(began, late.submitted)]
    loud = [gap for s in streams for gap in s.gaps(late.submitted, late.token_times[0])]
    return quiet, loud, first_token


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPressureSizes:
    rounds: int = 1
    sequences: int = 16  # at once: max_num_seqs
    requests: int = 48
    prompt: tuple[int, int] = (32, 96)  # shortest and longest
    output: tuple[int, int] = (96, 288)
    demand: float = 2.0  # final lengths of `sequences` sequences over the pool


def kv_pressure(start: Start, sizes: KvPressureSizes) -> Finding:
    """The same requests with too few and with enough KV blocks, all there from the start."""
    draw = random.Random(1)
    lengths = [
        (draw.randint(*sizes.prompt), draw.randint(*sizes.output)) for _ in range(sizes.requests)
    ]
    together = sizes.sequences * sum(map(sum, lengths)) / sizes.requests
    scarce_blocks, enough_blocks = _blocks(together / sizes.demand), _blocks(2 * together)
    runs = []
    for _ in range(sizes.rounds):
        enough = _run_all(start, sizes, lengths, enough_blocks)
        runs.append((enough, _run_all(start, sizes, lengths, scarce_blocks)))
    return _kv_pressure_finding(runs, lengths)


def _run_all(
    start: Start, sizes: KvPressureSizes, lengths: list[tuple[int, int]], num_blocks: int
) -> dict[str, Any]:
    traffic = start(num_kv_blocks=num_blocks, max_num_seqs=sizes.sequences)
    began = traffic.clock()
    timelines = [
        traffic.submit(str(i), traffic.random_tokens(prompt), output)
        for i, (prompt, output) in enumerate(lengths)
    ]
    traffic.finish()
    ended = traffic.clock()
    seconds = ended - began
    output_tokens = sum(len(timeline.token_ids) for timeline in timelines)
    traffic.core.close()
    return {
        "kv_blocks": num_blocks,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": output_tokens / seconds,
        "steps": traffic.num_steps,
        "sequences_per_step": round(output_tokens / traffic.num_steps, 2),
        "computed_tokens": traffic.computed_tokens,
        "preemptions": traffic.core.stats().num_preemptions,
        "share_of_time_in_the_model": round(traffic.model_seconds / seconds, 3),
        "first_token_seconds": summary([t.first_token_seconds for t in timelines]),
        "worst_gap_seconds": round(max(max(t.gaps(began, ended)) for t in timelines), 3),
        "ended": sum(
            len(t.token_ids) == output for t, (_, output) in zip(timelines, lengths, strict=True)
        ),
        "answers": [timeline.token_ids for timeline in timelines],
    }


def _kv_pressure_finding(
    runs: list[tuple[dict[str, Any], dict[str, Any]]], lengths: list[tuple[int, int]]
) -> Finding:
    speed = "output_tokens_per_second"
    needed = sum(prompt + output - 1 for prompt, output in lengths)
    ratio = median(scarce[speed] / enough[speed] for enough, scarce in runs)
    recomputed = max(scarce["computed_tokens"] / needed - 1 for _, scarce in runs)
    same = [enough.pop("answers") == scarce.pop("answers") for enough, scarce in runs]
    ended = min(scarce["ended"] for _, scarce in runs)
    checks = (
        Check("tokens/s, scarce over enough KV", ratio, "at least", 0.85),
        Check("tokens recomputed, of those needed", recomputed, "at most", 0.10),
        Check("requests that came to their end", ended / len(lengths), "at least", 1.0),
        Check("runs whose answers are those of enough KV", sum(same) / len(same), "at least", 1.0),
    )
    numbers = {
        "needed_tokens": needed,
        "enough": [enough for enough, _ in runs],
        "scarce": [scarce for _, scarce in runs],
    }
    measures = "all requests from the first submission to the last token, by number of KV blocks"
    return Finding("kv_pressure", measures, checks, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixSizes:
    rounds: int = 1
    adapters: int = 8
    shared: int = 1500
    own: int = 300
    rank: int = 16


def shared_prefix(start: Start, sizes: SharedPrefixSizes) -> Finding:
    """Two prompts for each adapter, one after the other, on an idle engine; the second hits."""
    total = sizes.rounds * sizes.adapters * (sizes.shared + 2 * (sizes.own + BLOCK_SIZE))
    traffic = start(num_kv_blocks=_blocks(total), max_loras=sizes.adapters)
    miss: list[Timeline] = []
    hit: list[Timeline] = []
    for adapter in load_random_adapters(traffic.core, sizes.adapters, sizes.rank):
        traffic.submit(f"fill-{adapter.digest}", [0], 1, adapter=adapter)
        traffic.finish()
        for number in range(sizes.rounds):
            shared = traffic.random_tokens(sizes.shared)
            for name, timelines in (("miss", miss), ("hit", hit)):
                prompt = shared + traffic.random_tokens(sizes.own)
                timelines.append(
                    traffic.submit(f"{name}-{number}-{adapter.digest}", prompt, 1, adapter=adapter)
                )
                traffic.finish()
    traffic.core.close()
    pairs = [(h.first_token_seconds, m.first_token_seconds) for h, m in zip(hit, miss, strict=True)]
    ratios = [h / m for h, m in pairs]
    numbers = {
        "ratio": summary(ratios),
        "miss_first_token_seconds": summary([m for _, m in pairs]),
        "hit_first_token_seconds": summary([h for h, _ in pairs]),
        "cached_tokens_of_hits": sorted({timeline.num_cached_tokens for timeline in hit}),
        "cached_tokens_of_misses": sorted({timeline.num_cached_tokens for timeline in miss}),
    }
    check = Check("time to first token, hit over miss", median(ratios), "at most", 0.2)
    measures = "time to first token of one request alone, its adapter in a slot; median of all"
    return Finding("shared_prefix", measures, (check,), numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSizes:
    rounds: int = 5  # messages asked at each turn that is measured
    turns: int = 20
    message: int = 60  # tokens a turn, by the user
    answer: int = 240  # and by the model


def conversation(start: Start, sizes: ConversationSizes) -> Finding:
    """A chat client's conversation: the whole history comes again with each message."""
    per_turn = sizes.message + sizes.answer + 4 * BLOCK_SIZE
    blocks = _blocks((sizes.turns + 2 * sizes.rounds) * per_turn)
    traffic, words = start(num_kv_blocks=blocks), random.Random(2)
    history: list[Mapping[str, object]] = []
    measured: dict[int, list[Timeline]] = {2: [], sizes.turns: []}
    lengths = []
    for turn in range(1, sizes.turns + 1):
        for number in range(sizes.rounds if turn in measured else 0):
            message = _message(traffic.core, words, sizes.message)
            timeline = _ask(traffic, f"{turn}-{number}", [*history, message], 1)
            measured[turn].append(timeline)
        message = _message(traffic.core, words, sizes.message)
        answer = _ask(traffic, str(turn), [*history, message], sizes.answer)
        history += [message, {"role": "assistant", "content": answer.text}]
        lengths.append((answer.num_prompt_tokens, answer.num_cached_tokens))
    traffic.core.close()
    second, last = ([t.first_token_seconds for t in one] for one in measured.values())
    numbers = {
        "second_turn_first_token_seconds": summary(second),
        "last_turn_first_token_seconds": summary(last),
        "prompt_tokens_by_turn": [prompt for prompt, _ in lengths],
        "computed_tokens_by_turn": [prompt - cached for prompt, cached in lengths],
    }
    ratio = median(last) / median(second)
    check = Check("time to first token, last over second turn", ratio, "at most", 1.5)
    measures = "from the messages to the first token, template and tokenizer included; medians"
    return Finding("conversation", measures, (check,), numbers)


def _message(core: EngineCore, words: random.Random, num_tokens: int) -> dict[str, object]:
    """A user's message of at least so many tokens, and hardly more."""
    text = words.choice(WORDS)
    while len(core.text.encode(text)) < num_tokens:
        text += " " + words.choice(WORDS)
    return {"role": "user", "content": text}


def _ask(
    traffic: Traffic, name: str, messages: list[Mapping[str, object]], max_tokens: int
) -> Timeline:
    submitted = traffic.clock()
    prompt = traffic.core.text.encode_chat(messages)
    timeline = traffic.submit(name, prompt, max_tokens, submitted=submitted)
    traffic.finish()
    return timeline


def _blocks(num_tokens: float) -> int:
    return -int(-num_tokens // BLOCK_SIZE)
