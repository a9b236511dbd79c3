"""Each reference op against its formula in float64, written out here a second time."""

import math

import pytest
import torch
from torch import Tensor

from manylora.kernels import load_backend
from manylora.kernels.surface import Activation, Backend, KVShape, LoraSlice, Norm, RowSpan

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # relative L2
BLOCK = 16
HEADS, KV_HEADS, SIZE = 6, 2, 24


@pytest.fixture
def backend() -> Backend:
    torch.manual_seed(0)
    return load_backend("cpu")


def assert_close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = float((ours.double() - expected).norm() / expected.norm())
    assert error <= TOLERANCE[dtype]


dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@dtypes
def test_rms_norm_divides_by_the_root_of_the_mean_square(
    backend: Backend, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(32, 50), torch.randn(50).to(dtype)

    y = backend.rms_norm(x, Norm(weight, 1e-5))
    offset = backend.rms_norm(x, Norm(weight, 1e-5, offset=1.0))

    root = (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert y.dtype == dtype
    assert_close(y, x.double() / root * weight.double(), dtype)
    assert_close(offset, x.double() / root * (1 + weight.double()), dtype)


@dtypes
def test_a_linear_layer_adds_each_rows_own_adapter_to_its_slice(
    backend: Backend, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(64, 40).to(dtype), torch.randn(30, 40).to(dtype)
    residual = torch.randn(64, 30)
    small = LoraSlice(4, torch.randn(3, 40).to(dtype), torch.randn(10, 3).to(dtype), 0.5)
    large = LoraSlice(0, torch.randn(9, 40).to(dtype), torch.randn(30, 9).to(dtype), 2.0)
    site = (0, "o")
    packed = [backend.pack_adapter({site: [piece]}) for piece in (small, large)]
    elsewhere = backend.pack_adapter({(1, "o"): [large]})
    mine = [(0, 5, packed[0]), (5, 20, None), (25, 10, packed[1]), (35, 3, packed[0])]
    plan = backend.plan_lora([*mine, (38, 2, elsewhere)])

    y = residual.clone()
    backend.linear_add_(y, x, backend.pack_weight(weight), site, plan)

    expected = residual.double() + x.double() @ weight.double().T
    for rows, piece in ((range(5), small), (range(25, 35), large), (range(35, 38), small)):
        stop = piece.start + len(piece.b)
        update = x[list(rows)].double() @ piece.a.double().T @ piece.b.double().T
        expected[list(rows), piece.start : stop] += piece.scale * update
    assert_close(y, expected, dtype)
    untouched = backend.plan_lora([])
    base = residual.clone()
    backend.linear_add_(base, x, backend.pack_weight(weight), site, untouched)
    assert torch.equal(y[5:25], base[5:25])  # rows of the base keep the base's bits
    assert torch.equal(y[38:40], base[38:40])  # so do rows whose adapter leaves this layer alone


@dtypes
def test_a_bias_is_added_once_whoever_the_row_belongs_to(
    backend: Backend, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(32, 40).to(dtype), torch.randn(30, 40).to(dtype)
    bias = torch.randn(30).to(dtype)
    piece = LoraSlice(0, torch.randn(3, 40).to(dtype), torch.randn(30, 3).to(dtype), 0.5)
    plan = backend.plan_lora([(0, 8, backend.pack_adapter({(0, "o"): [piece]}))])

    y = torch.zeros(32, 30)
    backend.linear_add_(y, x, backend.pack_weight(weight, bias), (0, "o"), plan)

    expected = x.double() @ weight.double().T + bias.double()
    expected[:8] += piece.scale * (x[:8].double() @ piece.a.double().T @ piece.b.double().T)
    assert_close(y, expected, dtype)


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_become_the_activation_of_the_one_times_the_other(
    backend: Backend, dtype: torch.dtype, activation: Activation
) -> None:
    x, weight = torch.randn(32, 20).to(dtype), torch.randn(2 * 33, 20).to(dtype)

    y = backend.gated_linear_unit(
        x, backend.pack_weight(weight), (0, "gate_up"), backend.plan_lora([]), activation
    )

    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    bend = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    formula = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu_tanh": gate / 2 * (1 + bend.tanh()),
    }
    assert_close(y, formula[activation] * up, dtype)


@dtypes
def test_a_soft_cap_bends_towards_its_bound(backend: Backend, dtype: torch.dtype) -> None:
    x = torch.randn(32, 70) * 20

    assert_close(backend.softcap(x, 15.0), 15 * (x.double() / 15).tanh(), dtype)


@dtypes
@pytest.mark.parametrize("renormalize", [True, False])
def test_each_row_gets_its_best_experts_by_their_share(
    backend: Backend, dtype: torch.dtype, renormalize: bool
) -> None:
    rows, hidden, inner, count, top_k = 45, 20, 12, 6, 2
    x, router = torch.randn(64, hidden).to(dtype), torch.randn(count, hidden).to(dtype)
    gate_up = torch.randn(count, 2 * inner, hidden).to(dtype)
    down = torch.randn(count, hidden, inner).to(dtype)
    residual = torch.randn(64, hidden)

    y = residual.clone()
    packed = backend.pack_weight(router)
    routing = backend.route(x, packed, top_k, renormalize=renormalize, num_rows=rows)
    experts = backend.pack_experts(list(gate_up), list(down))
    backend.experts_add_(y, x, experts, routing, "silu")

    expected = residual.double()
    shares = (x.double() @ router.double().T).softmax(-1)
    for row in range(rows):
        best = shares[row].argsort(descending=True)[:top_k]
        total = shares[row, best].sum() if renormalize else 1.0
        for expert in best.tolist():
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            answer = down[expert].double() @ (gate / (1 + (-gate).exp()) * up)
            expected[row] += shares[row, expert] / total * answer
    assert_close(y, expected, dtype)
    assert torch.equal(y[rows:], residual[rows:])  # padding goes nowhere


@dtypes
@pytest.mark.parametrize(
    ("past", "rows"), [(0, 40), (37, 1), (300, 9), (15, 2)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("window", [None, 1, 20, 128, 301])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_paged_attention_sees_exactly_its_own_keys(
    backend: Backend,
    dtype: torch.dtype,
    past: int,
    rows: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Blocks lie in any order; what stands behind the last key and in others' blocks is NaN."""
    total = past + rows
    num_blocks = math.ceil(total / BLOCK) + 3
    kv = backend.new_kv_cache(KVShape(1, KV_HEADS, SIZE, BLOCK), num_blocks, dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    table = torch.randperm(num_blocks)[: math.ceil(total / BLOCK)].tolist()
    keys, values = torch.randn(2, total, KV_HEADS, SIZE).to(dtype)
    for position in range(total):
        block, offset = table[position // BLOCK], position % BLOCK
        kv.keys[0, block, offset] = keys[position]
        kv.values[0, block, offset] = values[position]
    q = torch.randn(32 * math.ceil((rows + 4) / 32), HEADS, SIZE).to(dtype)

    plan = backend.plan_attention([RowSpan(4, rows, past, table)], BLOCK)
    y = backend.attention(q, kv, 0, plan, scale=0.3, window=window, softcap=softcap)

    expected = torch.zeros(rows, HEADS, SIZE, dtype=torch.float64)
    for row in range(rows):
        stop = past + row + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[seen, kv_head].double() @ q[4 + row, head].double() * 0.3
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            expected[row, head] = scores.softmax(0) @ values[seen, kv_head].double()
    assert_close(y[4 : 4 + rows], expected.flatten(1), dtype)
    assert not y[:4].any()


@dtypes
@pytest.mark.parametrize("turned", [SIZE, 10, 0], ids=lambda n: f"{n} dimensions turn")
@pytest.mark.parametrize("spanned", [None, "head", "projection"], ids=lambda n: f"norm: {n}")
def test_queries_and_keys_turn_by_their_position_and_keys_and_values_land_in_their_slots(
    backend: Backend, dtype: torch.dtype, turned: int, spanned: str | None
) -> None:
    rows, hidden = 5, 20
    kv = backend.new_kv_cache(KVShape(2, KV_HEADS, SIZE, BLOCK), 4, dtype)
    x = torch.randn(32, hidden).to(dtype)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * SIZE, hidden).to(dtype)
    angles = torch.rand(32, turned // 2) * 6
    slots = torch.tensor([17, 3, 40, 63, 0])
    together = {"head": 1, "projection": HEADS}.get(spanned or "", 0)
    q_weight = torch.randn(together * SIZE).to(dtype)
    k_weight = torch.randn(min(together, KV_HEADS) * SIZE).to(dtype)

    q = backend.qkv_rope_write_kv(
        x,
        backend.pack_weight(weight),
        (1, "qkv"),
        backend.plan_lora([]),
        torch.cat((angles.cos(), angles.sin()), -1) if turned else None,
        kv,
        slots,
        (Norm(q_weight, 0.1), Norm(k_weight, 0.1, offset=1.0)) if spanned else None,
    )

    heads = (x.double() @ weight.double().T).view(32, -1, SIZE)
    queries, keys, values = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    if spanned:
        queries = normalized(queries, q_weight.double())
        keys = normalized(keys, k_weight.double() + 1)
    queries, keys = rotated(queries, angles), rotated(keys, angles)
    assert_close(q, queries, dtype)
    layer_keys = kv.keys[1].flatten(0, 1)
    layer_values = kv.values[1].flatten(0, 1)
    assert_close(layer_keys[slots], keys[:rows], dtype)
    assert_close(layer_values[slots], values[:rows], dtype)
    assert not kv.keys[0].any()
    others = torch.ones(64, dtype=torch.bool)
    others[slots] = False
    assert not layer_keys[others].any()


def normalized(heads: Tensor, weight: Tensor) -> Tensor:
    """Heads [T, n, D] divided by the root mean square of D numbers, or of all of a row."""
    one = heads.flatten(1) if len(weight) > SIZE else heads
    return (one / (one.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight).view_as(heads)


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """As complex numbers: the pair (i, i + S/2) turns by the angle i; S of D dimensions turn."""
    half = angles.shape[1]
    pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, heads[..., 2 * half :]), -1)


def test_an_unknown_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_KERNELS", "warp")

    with pytest.raises(ValueError, match="warp"):
        load_backend("cpu")
