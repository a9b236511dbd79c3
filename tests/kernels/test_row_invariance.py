"""A row's bits do not depend on its company, at sizes where the libraries below change methods.

oneDNN picks another blocking at 32 rows than at 8 or 96 for the bfloat16 products here, so an op
that hands its batch over as it comes is found out.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manylora.kernels import load_backend
from manylora.kernels.surface import (
    Activation,
    KVShape,
    LoraSlice,
    Norm,
    RowSpan,
    accumulator_dtype,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BACKEND = load_backend("cpu")
SITE = (0, "o")
OUT, IN = 512, 4096

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
seeds = st.integers(0, 1 << 30)
SMALL, LARGE = 32, 224


def two_companies(rows: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The same 32 rows [32, M] as a batch of their own, and scattered in a large one.

    Returns:
        For both: the batch, and where in it the rows stand.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(LARGE, generator=generator)[:SMALL]
    large = torch.randn(LARGE, rows.shape[1], generator=generator).to(rows.dtype)
    large[places] = rows
    return [(rows, torch.arange(SMALL)), (large, places)]


@dtypes
@settings(max_examples=6, deadline=None)
@given(seed=seeds, rank=st.sampled_from([1, 7, 16]))
def test_a_linear_layer_with_adapters(dtype: torch.dtype, seed: int, rank: int) -> None:
    torch.manual_seed(0)
    weight = BACKEND.pack_weight(torch.randn(OUT, IN).to(dtype))
    own, other = (
        BACKEND.pack_adapter(
            {SITE: [LoraSlice(0, torch.randn(r, IN).to(dtype), torch.randn(OUT, r).to(dtype), 0.7)]}
        )
        for r in (rank, 5)
    )
    results = []
    for x, places in two_companies(torch.randn(SMALL, IN).to(dtype), seed):
        adapters = [other if row % 3 else own for row in range(len(x))]
        for place in places[:20].tolist():
            adapters[place] = own
        for place in places[20:].tolist():
            adapters[place] = None
        plan = BACKEND.plan_lora([(row, 1, adapter) for row, adapter in enumerate(adapters)])
        y = torch.zeros(len(x), OUT, dtype=accumulator_dtype(dtype))
        BACKEND.linear_add_(y, x, weight, SITE, plan)
        results.append(y[places])

    assert torch.equal(*results)


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_norm_bias_activation_and_cap(
    dtype: torch.dtype, activation: Activation, seed: int
) -> None:
    torch.manual_seed(0)
    norm = Norm(torch.randn(IN).to(dtype), 1e-5, offset=1.0)
    weight = torch.randn(2 * OUT, IN).to(dtype)
    packed = BACKEND.pack_weight(weight, torch.randn(2 * OUT).to(dtype))
    results = []
    for batch, places in two_companies(torch.randn(SMALL, IN), seed):
        x = BACKEND.rms_norm(batch.to(accumulator_dtype(dtype)), norm)
        y = BACKEND.gated_linear_unit(x, packed, SITE, BACKEND.plan_lora([]), activation)
        y = BACKEND.softcap(y.to(accumulator_dtype(dtype)), 1.5)
        results.append(y[places])

    assert torch.equal(*results)


@dtypes
@settings(max_examples=6, deadline=None)
@given(seed=seeds, per_head=st.booleans(), turned=st.sampled_from([64, 30]))
def test_queries_keys_and_values(
    dtype: torch.dtype, seed: int, per_head: bool, turned: int
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, size = 5, 1, 64
    weight = BACKEND.pack_weight(torch.randn((heads + 2 * kv_heads) * size, 256).to(dtype))
    q_weight = torch.randn(size if per_head else heads * size).to(dtype)
    norms = (Norm(q_weight, 1e-5), Norm(torch.randn(kv_heads * size).to(dtype), 1e-5))
    angles = torch.rand(turned // 2).expand(LARGE, -1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(accumulator_dtype(dtype))
    results = []
    for x, places in two_companies(torch.randn(SMALL, 256).to(dtype), seed):
        kv = BACKEND.new_kv_cache(KVShape(1, kv_heads, size, 16), LARGE // 16, dtype)
        slots, turns = torch.arange(len(x)), cos_sin[: len(x)]
        plan = BACKEND.plan_lora([])
        q = BACKEND.qkv_rope_write_kv(x, weight, (0, "qkv"), plan, turns, kv, slots, norms)
        k, v = kv.keys[0].flatten(0, 1), kv.values[0].flatten(0, 1)
        results.append(torch.cat((q[places], k[places], v[places]), dim=1))

    assert torch.equal(*results)


@dtypes
@settings(max_examples=6, deadline=None)
@given(seed=seeds, top_k=st.integers(1, 3), renormalize=st.booleans())
def test_a_mixture_of_experts(dtype: torch.dtype, seed: int, top_k: int, renormalize: bool) -> None:
    torch.manual_seed(0)
    hidden, inner, count = 512, 4096, 3
    router = BACKEND.pack_weight(torch.randn(count, hidden).to(dtype))
    experts = BACKEND.pack_experts(
        list(torch.randn(count, 2 * inner, hidden).to(dtype)),
        list(torch.randn(count, hidden, inner).to(dtype)),
    )
    results = []
    for x, places in two_companies(torch.randn(SMALL, hidden).to(dtype), seed):
        y = torch.zeros(len(x), hidden, dtype=accumulator_dtype(dtype))
        routing = BACKEND.route(x, router, top_k, renormalize=renormalize, num_rows=len(x))
        BACKEND.experts_add_(y, x, experts, routing, "silu")
        results.append(y[places])

    assert torch.equal(*results)


@dtypes
@settings(max_examples=10, deadline=None)
@given(
    past=st.integers(0, 300),
    before=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 20)), max_size=12),
    extra=st.integers(0, 20),
    seed=st.integers(0, 9),
    window=st.sampled_from([None, 1, 50, 128, 200]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_attention(
    dtype: torch.dtype,
    past: int,
    before: list[tuple[int, int]],
    extra: int,
    seed: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """One query alone, or the first of a longer chunk behind other sequences; blocks elsewhere."""
    torch.manual_seed(0)
    shape = KVShape(1, 3, 64, 16)
    keys, values = torch.randn(2, past + 1 + extra, 3, 64).to(dtype)
    query = torch.randn(9, 64).to(dtype)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()

    def result(spans: list[tuple[int, int]], rows: int, table: list[int]) -> Tensor:
        kv = BACKEND.new_kv_cache(shape, 64, dtype)
        kv.keys.normal_()
        kv.values.normal_()
        for position in range(past + rows):
            kv.keys[0, table[position // 16], position % 16] = keys[position]
            kv.values[0, table[position // 16], position % 16] = values[position]
        first = sum(count for _, count in spans)
        plan, at = [], 0
        for span_past, count in spans:
            plan.append(RowSpan(at, count, span_past, order))
            at += count
        plan.append(RowSpan(first, rows, past, table))
        q = torch.randn(32 * (1 + (first + rows) // 32), 9, 64).to(dtype)
        q[first] = query
        planned = BACKEND.plan_attention(plan, 16)
        y = BACKEND.attention(q, kv, 0, planned, scale=0.125, window=window, softcap=softcap)
        return y[first]

    assert torch.equal(result([], 1, list(range(64))), result(before, 1 + extra, order))
