"""Which rotary embedding a config asks for, and how it is stretched. Loads no torch.

Field names and defaults are those of transformers' `modeling_rope_utils.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manylora.engine.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Linear:
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """The same by number of turns, with warmer attention (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class DynamicNtk:
    """A larger theta the longer the sequence; none up to the trained length."""

    factor: float
    trained_positions: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """A divisor for each frequency, one set up to the trained length (arXiv 2402.13753)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_positions: int
    attention_factor: float


Scaling = Linear | Llama3 | Yarn | DynamicNtk | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding."""

    theta: float
    size: int  # leading dimensions of a head that are rotated, an even number
    scaling: Scaling | None = None

    def max_positions(self, max_position_embeddings: int) -> int:
        """The positions that the scaling reaches, at least those of the config."""
        match self.scaling:
            case Linear(factor) | DynamicNtk(factor):
                return int(max_position_embeddings * max(1.0, factor))
            case Yarn(factor, original):
                return max(max_position_embeddings, int(original * factor))
            case _:
                return max_position_embeddings


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(
    fields: Fields,
    head_size: int,
    *,
    types: Sequence[str] = ROPE_TYPES,
    partial: bool = False,
) -> Rope:
    """The rotary embedding of `rope_parameters`, or of `rope_theta` and `rope_scaling` before it.

    Args:
        types: the `rope_type`s that the family may have.
        partial: it may rotate only the first `partial_rotary_factor` of a head.

    Raises:
        ModelError: a value is missing, malformed or not supported.
    """
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    section = fields.section(name)
    if section.has("full_attention") or section.has("sliding_attention"):
        raise fields.error(name, "differs by layer type, which this model_type does not do")
    kinds = {kind: kind for kind in types}
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.choice(key, kinds) if section.has(key) else "default"
    theta = _theta(section if "rope_theta" in section else fields)
    size = _rotated_size(section, head_size, partial) or _rotated_size(fields, head_size, partial)
    size = size or head_size
    return Rope(theta, size, _scaling(kind, fields, section, size))


def _theta(where: Fields) -> float:
    theta = where.number("rope_theta")
    if theta <= 1:
        raise where.error("rope_theta", "turns every pair alike")
    return theta


def _rotated_size(where: Fields, head_size: int, partial: bool) -> int | None:
    share = where.optional_number("partial_rotary_factor")
    if share is None:
        return None
    size = int(head_size * share)
    if size != head_size and not partial:
        raise where.error("partial_rotary_factor", "is not supported for this model_type")
    if not 0 < size <= head_size or size % 2:
        raise where.error("partial_rotary_factor", f"rotates {size} of a head's {head_size}")
    return size


def _scaling(kind: str, fields: Fields, section: Fields, size: int) -> Scaling | None:
    positions = fields.size("max_position_embeddings")
    original = (
        fields.optional_size("original_max_position_embeddings")
        or section.optional_size("original_max_position_embeddings")
        or positions
    )
    match kind:
        case "linear":
            return Linear(section.number("factor"))
        case "dynamic":
            if size < 4:
                raise section.error("rope_type", f"needs heads of more than {size} dimensions")
            return DynamicNtk(section.number("factor"), positions)
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if high <= low:
                raise section.error("high_freq_factor", "is not above low_freq_factor")
            return Llama3(section.number("factor"), low, high, original)
        case "yarn":
            return _yarn(section, positions / original, original)
        case "longrope":
            return _longrope(section, positions / original, original, size)
        case _:
            return None


def _yarn(section: Fields, ratio: float, original: int) -> Yarn:
    factor = section.optional_number("factor") or ratio
    mscale = section.optional_number("mscale")
    mscale_all_dim = section.optional_number("mscale_all_dim")
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = _yarn_warmth(factor, mscale) / _yarn_warmth(factor, mscale_all_dim)
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        truncate=section.flag("truncate") if section.has("truncate") else True,
        attention_factor=attention_factor or _yarn_warmth(factor, 1.0),
    )


def _yarn_warmth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(section: Fields, ratio: float, original: int, size: int) -> LongRope:
    factor = section.optional_number("factor") or ratio
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        if original < 2:
            raise section.error("original_max_position_embeddings", "is below 2")
        stretched = 1 + math.log(factor) / math.log(original) if factor > 1 else 1.0
        attention_factor = math.sqrt(stretched)
    return LongRope(
        short_factor=section.numbers("short_factor", size // 2),
        long_factor=section.numbers("long_factor", size // 2),
        original_positions=original,
        attention_factor=attention_factor,
    )
