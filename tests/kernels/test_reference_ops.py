"""Each reference op against its formula in float64, written out here a second time."""

import math

import pytest
import torch
from torch import Tensor

from manylora.kernels import load_backend
from manylora.kernels.surface import Backend, KVShape, LoraSlice, RowSpan

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

    y = backend.rms_norm(x, weight, 1e-5)

    root = (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert y.dtype == dtype
    assert_close(y, x.double() / root * weight.double(), dtype)


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
def test_gate_and_up_become_silu_of_the_one_times_the_other(
    backend: Backend, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(32, 20).to(dtype), torch.randn(2 * 33, 20).to(dtype)

    y = backend.gate_up_silu_mul(
        x, backend.pack_weight(weight), (0, "gate_up"), backend.plan_lora([])
    )

    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    assert_close(y, gate / (1 + (-gate).exp()) * up, dtype)


@dtypes
@pytest.mark.parametrize(
    ("past", "rows"), [(0, 40), (37, 1), (300, 9), (15, 2)], ids=lambda v: str(v)
)
def test_paged_attention_sees_exactly_its_own_keys(
    backend: Backend, dtype: torch.dtype, past: int, rows: int
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
    y = backend.attention(q, kv, 0, plan)

    expected = torch.zeros(rows, HEADS, SIZE, dtype=torch.float64)
    for row in range(rows):
        seen = past + row + 1
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[:seen, kv_head].double() @ q[4 + row, head].double() / SIZE**0.5
            expected[row, head] = scores.softmax(0) @ values[:seen, kv_head].double()
    assert_close(y[4 : 4 + rows], expected.flatten(1), dtype)
    assert not y[:4].any()


@dtypes
def test_queries_and_keys_turn_by_their_position_and_keys_and_values_land_in_their_slots(
    backend: Backend, dtype: torch.dtype
) -> None:
    rows, hidden = 5, 20
    kv = backend.new_kv_cache(KVShape(2, KV_HEADS, SIZE, BLOCK), 4, dtype)
    x = torch.randn(32, hidden).to(dtype)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * SIZE, hidden).to(dtype)
    angles = torch.rand(32, SIZE // 2) * 6
    slots = torch.tensor([17, 3, 40, 63, 0])

    q = backend.qkv_rope_write_kv(
        x,
        backend.pack_weight(weight),
        (1, "qkv"),
        backend.plan_lora([]),
        torch.cat((angles.cos(), angles.sin()), -1),
        kv,
        slots,
    )

    heads = (x.double() @ weight.double().T).view(32, -1, SIZE)
    # As complex numbers: the pair (i, i + D/2) turns by the angle i.
    pairs = torch.complex(heads[..., : SIZE // 2], heads[..., SIZE // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    rotated = torch.cat((turned.real, turned.imag), -1)
    assert_close(q, rotated[:, :HEADS], dtype)
    layer_keys = kv.keys[1].flatten(0, 1)
    layer_values = kv.values[1].flatten(0, 1)
    assert_close(layer_keys[slots], rotated[:rows, HEADS : HEADS + KV_HEADS], dtype)
    assert_close(layer_values[slots], heads[:rows, HEADS + KV_HEADS :], dtype)
    assert not kv.keys[0].any()
    others = torch.ones(64, dtype=torch.bool)
    others[slots] = False
    assert not layer_keys[others].any()


def test_an_unknown_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_KERNELS", "warp")

    with pytest.raises(ValueError, match="warp"):
        load_backend("cpu")
