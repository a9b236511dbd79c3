"""In what decoders differ beyond their sizes: norms, windows, caps, biases, experts, names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from manylora.engine.models.rope_config import Rope

Activation = Literal["silu", "gelu_tanh"]

SEPARATE: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules of each linear layer that is computed as one, in the order of their outputs."""

FUSED: Mapping[str, tuple[str, ...]] = {
    **SEPARATE,
    "qkv": ("self_attn.qkv_proj",),
    "gate_up": ("mlp.gate_up_proj",),
}
"""The same where the model's own modules are fused already (Phi-3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The tensors of the norms around attention and MLP; None where there is none.

    A norm after attention or MLP comes before the result joins the residual stream.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORM = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORM = NormNames(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
SANDWICH_NORM = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts (Shazeer et al., arXiv 1701.06538) in the place of an MLP."""

    count: int
    top_k: int  # experts of one token
    intermediate_size: int
    renormalize: bool  # let the weights of a token's experts sum to one
    router: str  # module names; the next three with {} for an expert's index
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Layer:
    """In what one layer may differ from the next."""

    window: int | None  # the keys that a query sees, its own the last; None for all
    rope: Rope | None
    sparse: bool = False  # experts take the place of the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder's facts; the defaults are Llama's."""

    layers: tuple[Layer, ...]
    activation: Activation
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE)
    biased: frozenset[str] = frozenset()  # which of `modules` add a bias
    norms: NormNames = PRE_NORM
    norm_offset: float = 0.0  # added to the weight of every norm
    qk_norm: Literal["head", "projection"] | None = None  # what a norm of queries and keys spans
    attention_scale: float | None = None  # of query times key; None for head size ** -0.5
    attention_softcap: float | None = None  # c * tanh(score / c)
    embedding_scale: float = 1.0
    embedding_scale_rounds: bool = False  # to the dtype of the model
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    experts: Experts | None = None
