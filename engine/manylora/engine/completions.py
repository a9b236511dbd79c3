"""The `n` completions of one prompt: as many requests, each with a seed of its own."""

import hashlib
from dataclasses import replace

from manylora.engine.api import SamplingParams


def params_of_completions(params: SamplingParams, seed: int) -> list[SamplingParams]:
    """What each of the `n` completions is generated with, all with `n=1`.

    The first is what `n=1` would give. The others draw from seeds that follow from (seed, index)
    alone. The prompt's log-probabilities are the same for all, so only the first tells them.

    Args:
        seed: the request's, or the engine's next where it brings none.
    """
    first = replace(params, n=1, seed=seed)
    others = [
        replace(first, seed=_seed_of(seed, index), prompt_logprobs=None)
        for index in range(1, params.n)
    ]
    return [first, *others]


def _seed_of(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as a seed may have
